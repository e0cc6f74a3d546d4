// How the layers above use the core: a Runtime, and the groups of it (GroupHandle).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "collective/algorithm_table.h"
#include "collective/compressed.h"
#include "collective/factory.h"
#include "collective/finite.h"
#include "collective/operation.h"
#include "engine/engine.h"
#include "meet/connection_thread.h"
#include "meet/rendezvous.h"

namespace ringdp {

// Runtime: one rank's part in a job: the connections, the engine and its two threads. Not a global: tests make one per
// rank in one process. Owned by the process groups of the process, or by a test. Created and destroyed by any thread;
// destruction says goodbye to the peers and joins the threads (after a fork, in the child, it does nothing).
class Runtime {
 public:
  // Runs the rendezvous (blocking, see `meet`) and starts the threads.
  Runtime(Store& store, const RendezvousOptions& rendezvous, EngineOptions options, AlgorithmTables tables = {});
  // After a rendezvous. `tables`: the job's; the ranks have compared them there (RendezvousOptions::tables).
  Runtime(int rank, Mesh mesh, EngineOptions options, AlgorithmTables tables = {});
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  Engine& engine() { return *engine_; }
  std::shared_ptr<Engine> share_engine() { return engine_; }
  // The number of each rank's host, in order of appearance; if the ranks have sites, of its site, which collectives
  // treat as a host.
  const std::vector<int>& hosts() const { return hosts_; }
  const AlgorithmTables& tables() const { return tables_; }                // as configured
  const AlgorithmTables& tables_in_use() const { return tables_in_use_; }  // for this job's round trip
  int64_t round_trip_us() const { return round_trip_us_; }                 // Mesh::round_trip_us
  // By number of host: its link to the others by the job's map (AlgorithmTables::uplinks). A host that the map does not
  // name counts as the fastest that it names. Empty without a map.
  struct Uplink {
    std::string host;
    std::size_t bytes_per_s;
    bool named;
  };
  const std::vector<Uplink>& uplinks() const { return uplinks_; }
  bool far() const { return tables_in_use_ != tables_; }  // the round trip counts as long
  // The transport's name to every other rank; the expected one if it is not connected yet.
  const std::map<int, std::string>& transports() const { return transports_; }

  void shut_down();  // idempotent
  bool ended() const { return ended_; }

 private:
  std::shared_ptr<Engine> engine_;                // also held by the threads and by works still waited for
  std::shared_ptr<ConnectionThread> connecting_;  // null if no connection is missing and none can break
  std::unique_ptr<std::thread> communication_;
  std::unique_ptr<std::thread> completion_;
  const unsigned generation_ = fork_generation();
  std::atomic<bool> ended_{false};
  std::vector<int> hosts_;
  const AlgorithmTables tables_;
  const std::vector<Uplink> uplinks_;
  const int64_t round_trip_us_;
  const AlgorithmTables tables_in_use_;
  std::map<int, std::string> transports_;
};

class ElasticGroup;

struct CallOptions {
  int64_t timeout_ms = 0;     // 0: the group's
  bool caller_waits = false;  // `wait` follows at once
  // this and the next ones: see Engine::Submission and Operation::wrap
  std::function<void(std::exception_ptr)> on_done;
  std::shared_ptr<void> keep_alive;
  std::function<void()> before;
  std::function<void()> after;
  std::shared_ptr<Staging> staging;      // if the buffers mirror a device's memory; else null
  int32_t call_site = -1;                // see OperationRecord
  std::shared_ptr<FiniteReport> finite;  // of an all-reduce of a floating type: filled in when it is done; may be null
  // Of an all-reduce in place of float32 or float64: factors of the ranks' inputs, the same on all ranks; empty: none.
  std::vector<double> factors;
  std::span<const std::byte> input;  // of an all-reduce: the input, which is not changed; empty: in place
};

// OpenGroup: a group of ranks in the engine: its members, submitting operations to it, their timeout, and its end.
// Base of GroupHandle, which has the operations. Any thread.
class OpenGroup {
 public:
  // `members[i]`: rank of group rank i in the Runtime's world. `name` must be the same on all members. `elastic`: of
  // which it is a view; null: its members do not change.
  OpenGroup(std::shared_ptr<Runtime> runtime, const std::string& name, const std::vector<int>& members,
            int64_t timeout_ms, const std::shared_ptr<ElasticGroup>& elastic = nullptr);
  ~OpenGroup() { close(); }
  OpenGroup(const OpenGroup&) = delete;
  OpenGroup& operator=(const OpenGroup&) = delete;

  // Throws the operation's error; `timeout_ms` 0 waits as long as the operation's own timeout allows.
  void wait(Work& work, int64_t timeout_ms = 0);

  // The group's failure; null while it has none.
  std::exception_ptr failure() const { return engine_->failure_of(id_); }
  // See Engine::listen.
  void on_failure(std::weak_ptr<const FailureListener> listener) { engine_->listen(id_, std::move(listener)); }

  // From now on its operations may stay pending for as long as the job lasts: they have no deadline, nobody is warned
  // that they wait, and dumps do not have them.
  void let_rest() { engine_->let_rest(id_); }

  uint64_t id() const { return id_; }  // its number on the wire
  // of which it is a view; null: its members do not change
  std::shared_ptr<ElasticGroup> elastic() const { return elastic_.lock(); }
  void set_timeout_ms(int64_t timeout_ms) { timeout_ms_ = timeout_ms; }
  int64_t timeout_ms() const { return timeout_ms_; }
  const GroupView& view() const { return view_; }
  Runtime& runtime() { return *runtime_; }
  const std::shared_ptr<Runtime>& share_runtime() const { return runtime_; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }
  // The transport's name to each other member, by its place in the group.
  std::map<int, std::string> transports() const;
  void close(const std::string& how = "destroyed");  // operations in flight fail; `how` is in their error; idempotent

 protected:
  std::shared_ptr<Work> submit(std::unique_ptr<Operation> operation, CallOptions options);

 private:
  std::shared_ptr<Runtime> runtime_;  // shared by all groups of the process
  std::shared_ptr<Engine> engine_;
  GroupView view_;
  uint64_t id_;
  const std::weak_ptr<ElasticGroup> elastic_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<bool> open_{true};
};

// GroupHandle: the collectives of one group of ranks, as the Python-facing layers call them. Owned by a process group
// (or by Python, in tests). Any thread, but the order of collectives must be the same on all ranks of the group;
// messages are ordered by sender, receiver and tag alone. Buffers must live until the Work is done.
class GroupHandle : public OpenGroup {
 public:
  // See OpenGroup. `tables`: which algorithm does what, by the layout of the group.
  GroupHandle(std::shared_ptr<Runtime> runtime, const std::string& name, const std::vector<int>& members,
              int64_t timeout_ms, const AlgorithmTables& tables,
              const std::shared_ptr<ElasticGroup>& elastic = nullptr);

  // From now on all-reduces add in rank order (GroupView::rank_order). All members must call it between the same two
  // operations.
  void add_in_rank_order() { rank_order_ = true; }
  bool adds_in_rank_order() const { return rank_order_; }
  // The view of all-reduces.
  GroupView all_reduce_view() const;

  std::shared_ptr<Work> barrier(CallOptions options);
  // Announces an operation of another backend, see make_announcement. Done when all members have announced it.
  std::shared_ptr<Work> announce(const Announcement& what, CallOptions options);
  // The algorithm of an all-reduce of so many bytes.
  Algorithm algorithm_of_all_reduce(DType dtype, std::size_t bytes) const {
    return choose_all_reduce(table_, view().hosts, dtype, bytes);
  }
  // Whether a bucket of so many bytes with a codec is sent as codes (AlgorithmTable::exact_bucket_bytes).
  bool sends_codes(std::size_t bytes) const { return bytes > table_.exact_bucket_bytes; }
  std::shared_ptr<Work> all_reduce(std::span<std::byte> memory, DType dtype, ReduceOp op, CallOptions options);
  // The mean of all ranks' sections, as codes on the wire; the same bits on all of them.
  std::shared_ptr<Work> all_reduce_compressed(std::vector<CompressedSection> sections, const Compression& compression,
                                              CallOptions options);
  std::shared_ptr<Work> broadcast(std::span<std::byte> memory, DType dtype, int root, CallOptions options);
  // Of several tensors in one operation: see make_all_gather.
  std::shared_ptr<Work> all_gather(const std::vector<GatheredTensor>& tensors, DType dtype, CallOptions options);
  std::shared_ptr<Work> all_gather(std::span<const std::byte> input, std::vector<std::span<std::byte>> blocks,
                                   DType dtype, CallOptions options);
  // Whether tensors whose outputs have so many bytes may be reduced in one operation.
  bool scatters_together(std::size_t bytes) const {
    return choose_reduce_scatter(table_, view().hosts, bytes) == Algorithm::kPairwise;
  }
  std::shared_ptr<Work> reduce_scatter(const std::vector<ScatteredTensor>& tensors, DType dtype, ReduceOp op,
                                       CallOptions options);
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
  // Messages: outside the order of the collectives; the n-th to a rank with a tag matches its n-th receive of that
  // kind.
  std::shared_ptr<Work> send(std::span<std::byte> memory, DType dtype, int to, int32_t tag, CallOptions options);
  std::shared_ptr<Work> receive(std::span<std::byte> memory, DType dtype, int from, int32_t tag, CallOptions options);

 private:
  const AlgorithmTable table_;  // of this group's layout
  std::atomic<bool> rank_order_{false};
};

}  // namespace ringdp
