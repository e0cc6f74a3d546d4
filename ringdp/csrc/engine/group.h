// GroupHandle: the collectives of one group of ranks, as the Python-facing layers call them. Owned by a process group (or by
// Python, in tests). Any thread, but the order of collectives must be the same on all ranks of the group; messages are
// ordered by sender, receiver and tag alone. Buffers must live until the Work is done.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "collective/compressed.h"
#include "collective/factory.h"
#include "collective/finite.h"
#include "engine/runtime.h"

namespace ringdp {

struct CallOptions {
  int64_t timeout_ms = 0;                           // 0: the group's
  bool caller_waits = false;                        // `wait` follows at once
  std::function<void(std::exception_ptr)> on_done;  // these: see Engine::Submission and Operation::wrap
  std::shared_ptr<void> keep_alive;
  std::function<void()> before;
  std::function<void()> after;
  std::shared_ptr<Staging> staging;      // the buffers mirror a device's memory; null: they do not
  std::shared_ptr<FiniteReport> finite;  // of an all-reduce of a floating type: filled in when it is done; may be null
};

class GroupHandle {
 public:
  // `members[i]`: rank of group rank i in the Runtime's world. `name` must be the same on all members.
  GroupHandle(std::shared_ptr<Runtime> runtime, const std::string& name, std::vector<int> members, int64_t timeout_ms,
              const AlgorithmTables& tables);
  ~GroupHandle();
  GroupHandle(const GroupHandle&) = delete;
  GroupHandle& operator=(const GroupHandle&) = delete;

  std::shared_ptr<Work> barrier(CallOptions options);
  // Announces an operation of another backend, see make_announcement. Done when all members have announced it.
  std::shared_ptr<Work> announce(const Announcement& what, CallOptions options);
  std::shared_ptr<Work> all_reduce(std::span<std::byte> memory, DType dtype, ReduceOp op, CallOptions options);
  // The mean of all ranks' sections, as codes on the wire; the same bits on all of them.
  std::shared_ptr<Work> all_reduce_compressed(std::vector<CompressedSection> sections, const Compression& compression,
                                              CallOptions options);
  std::shared_ptr<Work> broadcast(std::span<std::byte> memory, DType dtype, int root, CallOptions options);
  std::shared_ptr<Work> all_gather(std::span<const std::byte> input, std::vector<std::span<std::byte>> blocks,
                                   DType dtype, CallOptions options);
  std::shared_ptr<Work> reduce_scatter(std::vector<std::span<std::byte>> chunks, std::span<std::byte> output,
                                       DType dtype, ReduceOp op, CallOptions options);

  std::shared_ptr<Work> reduce(std::span<std::byte> memory, DType dtype, ReduceOp op, int root, CallOptions options);
  // `blocks` on the root, `chunks` on the root: empty elsewhere.
  std::shared_ptr<Work> gather(std::span<const std::byte> input, std::vector<std::span<std::byte>> blocks, DType dtype,
                               int root, CallOptions options);
  std::shared_ptr<Work> scatter(std::vector<std::span<std::byte>> chunks, std::span<std::byte> output, DType dtype,
                                int root, CallOptions options);
  std::shared_ptr<Work> all_to_all(std::vector<std::span<std::byte>> chunks, std::vector<std::span<std::byte>> blocks,
                                   DType dtype, CallOptions options);
  // Messages: outside the order of the collectives; the n-th to a rank under a tag meets its n-th receive of that kind.
  std::shared_ptr<Work> send(std::span<std::byte> memory, DType dtype, int to, int32_t tag, CallOptions options);
  std::shared_ptr<Work> receive(std::span<std::byte> memory, DType dtype, int from, int32_t tag, CallOptions options);

  // Throws the operation's error; `timeout_ms` 0 waits as long as the operation's own timeout allows.
  void wait(Work& work, int64_t timeout_ms = 0);

  // Why the group has failed; null while it has not.
  std::exception_ptr failure() const { return engine_->failure_of(id_); }
  // See Engine::listen.
  void on_failure(std::weak_ptr<const FailureListener> listener) { engine_->listen(id_, std::move(listener)); }

  // From the start to the end of an estimate operations are noted instead of run; their Works are done. The end returns
  // what was noted. Throw Error(kState) where an estimate is under way already, or none.
  void start_estimate();
  std::vector<OperationShape> end_estimate();

  void set_timeout_ms(int64_t timeout_ms) { timeout_ms_ = timeout_ms; }
  int64_t timeout_ms() const { return timeout_ms_; }
  const GroupView& view() const { return view_; }
  Runtime& runtime() { return *runtime_; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }
  // The transport's name to each other member, by its place in the group.
  std::map<int, std::string> transports() const;
  void close(const std::string& how = "destroyed");  // operations in flight fail with that word; idempotent

 private:
  std::shared_ptr<Work> submit(std::unique_ptr<Operation> operation, CallOptions options);
  std::shared_ptr<Work> note(const Operation& operation, const CallOptions& options);

  std::shared_ptr<Runtime> runtime_;  // shared by all groups of the process
  std::shared_ptr<Engine> engine_;
  GroupView view_;
  uint64_t id_;
  std::atomic<int64_t> timeout_ms_;
  const AlgorithmTable table_;  // of this group's layout
  std::atomic<bool> open_{true};
  std::atomic<bool> estimating_{false};
  std::mutex estimate_mutex_;
  std::vector<OperationShape> estimated_;  // by that mutex
};

}  // namespace ringdp
