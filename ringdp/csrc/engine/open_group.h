// OpenGroup: a group of ranks in the engine: its members, submitting operations to it, their timeout, and its end.
// Base of GroupHandle, which has the operations. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/finite.h"
#include "collective/operation.h"
#include "engine/runtime.h"

namespace ringdp {

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

  uint64_t id() const { return id_; }  // its number on the wire
  // of which it is a view; null: its members do not change
  std::shared_ptr<ElasticGroup> elastic() const { return elastic_.lock(); }
  void set_timeout_ms(int64_t timeout_ms) { timeout_ms_ = timeout_ms; }
  int64_t timeout_ms() const { return timeout_ms_; }
  const GroupView& view() const { return view_; }
  Runtime& runtime() { return *runtime_; }
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

}  // namespace ringdp
