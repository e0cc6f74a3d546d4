// DeviceGuard: watches over a backend that moves a group's device tensors (NCCL) beside `ring`, which connects the same ranks.
// Ranks announce over ring what they are about to do there, so that a disagreement is told instead of hanging, who is late is
// named, and a lost peer is noticed as ever. When ring's group fails, the guard aborts the other backend, whose kernels
// would wait for ever, and keeps the cause.
// Owned by the ProcessGroupRing it stands beside, shared with the reducers that use it. Any thread, without the GIL. It has a
// thread of its own, because abort() may take seconds and the engine's driver must not wait. In a forked child it does nothing.
#pragma once

#include <ATen/core/ivalue.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/fd.h"
#include "engine/group.h"

namespace ringdp {

class DeviceGuard {
 public:
  DeviceGuard(std::shared_ptr<GroupHandle> group, c10::intrusive_ptr<c10d::Backend> foreign);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  const std::string& backend() const { return state_->name; }
  bool guards(const c10d::Backend* foreign) const { return foreign_.get() == foreign; }

  // This rank is about to begin that operation, under the current name. Nobody waits for the others here; throws the group's
  // failure. `by` is filled in.
  std::shared_ptr<Work> announce(Announcement what);
  // Until all ranks have announced it; throws what failed.
  void wait(Work& announcement);

  // Throws why ring's group failed, if it has.
  void throw_if_failed() const;
  // Inside a catch block, for what the foreign backend threw: returns where ring knows of nothing, a moment later too; else
  // throws ring's cause, for that names the guilty rank.
  void throw_first_cause() const;
  // Until the foreign backend's future is complete; throws ring's cause as soon as there is one. (On devices such futures
  // are complete at once, and what they stand for is in a stream.)
  void wait_for(c10::ivalue::Future& future) const;

  bool aborted() const;  // the foreign backend's abort() has returned

  // Before the group is destroyed in good order: until all ranks have announced what this one did. Errors are left aside;
  // Python's signals are not.
  void drain();
  // Ends the thread; the foreign backend is aborted no more. Idempotent.
  void close();

 private:
  struct State {  // shared with the thread, which may be inside abort() for long, and with the other backend's futures
    std::string name;
    std::mutex mutex;
    std::condition_variable changed;
    std::exception_ptr failure;  // of ring's group
    bool stopping = false;
    bool aborted = false;
    bool ended = false;
  };
  static void run(const std::shared_ptr<State>& state, const c10::intrusive_ptr<c10d::Backend>& foreign);
  std::exception_ptr failure_within(std::chrono::milliseconds time) const;

  const std::shared_ptr<GroupHandle> group_;  // shared with the ProcessGroupRing
  const std::shared_ptr<State> state_;
  const c10::intrusive_ptr<c10d::Backend> foreign_;  // shared with the thread; no thread of its own may drop it
  std::shared_ptr<const FailureListener> listener_;
  std::mutex announced_mutex_;
  std::deque<std::shared_ptr<Work>> announced_;  // and not known to have ended
  std::unique_ptr<std::thread> thread_;
  const unsigned generation_ = fork_generation();
};

// The guard of what reduces the group's tensors on that kind of device: null where that is ring itself, or ring is not in the
// group at all. Lives at least as long as the group's ring.
std::shared_ptr<DeviceGuard> guard_of(c10d::ProcessGroup& group, c10::DeviceType device);

}  // namespace ringdp
