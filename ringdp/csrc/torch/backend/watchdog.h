// BackendWatchdog: watches over a backend that moves a group's device tensors (NCCL) beside `ring`, which connects the
// same ranks. Ranks announce each of that backend's operations over ring, so that a disagreement is an error instead
// of a hang, and late and lost ranks are named. When ring's group fails, the watchdog aborts the other backend, whose
// kernels would wait for ever, and keeps the cause. Owned by the ProcessGroupRing of the same group, shared with the
// reducers that use it. Any thread, without the GIL. It has a thread of its own, because abort() may take seconds and
// the engine's driver must not wait. In a forked child it does nothing.
#pragma once

#include <ATen/core/ivalue.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/fd.h"
#include "engine/group.h"

namespace ringdp {

class BackendWatchdog {
 public:
  BackendWatchdog(std::shared_ptr<GroupHandle> group, c10::intrusive_ptr<c10d::Backend> foreign);
  ~BackendWatchdog();
  BackendWatchdog(const BackendWatchdog&) = delete;
  BackendWatchdog& operator=(const BackendWatchdog&) = delete;

  const std::string& backend() const { return state_->name; }
  bool watches(const c10d::Backend* foreign) const { return foreign_.get() == foreign; }

  // Announces the next operation of this rank, under the current name. Does not wait for the other ranks; throws the
  // group's failure. Fills in `by`.
  std::shared_ptr<Work> announce(Announcement what);
  // Waits until all ranks have announced it; throws the announcement's error.
  void wait(Work& announcement);

  // Throws the failure of ring's group, if it has failed.
  void throw_if_failed() const;
  // Waits for a future of the foreign backend, which `future_of` gets; throws ring's failure as soon as there is one,
  // and before the future's own. (On devices such futures are complete at once, and their results are ordered by a
  // stream.)
  void wait_for(const std::function<c10::intrusive_ptr<c10::ivalue::Future>()>& future_of) const;

  bool failed() const;   // ring's group has
  bool aborted() const;  // the foreign backend's abort() has returned

  // Called before the group is destroyed in good order: waits until all ranks have announced this one's operations.
  // Ignores errors, but not Python's signals.
  void drain();
  // Ends the thread; the foreign backend is not aborted from now on. Idempotent.
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
  void wait_until_complete_or_failed(c10::ivalue::Future& future) const;

  const std::shared_ptr<GroupHandle> group_;  // shared with the ProcessGroupRing
  const std::shared_ptr<State> state_;
  const c10::intrusive_ptr<c10d::Backend> foreign_;  // shared with the thread; no thread of its own may drop it
  std::shared_ptr<const FailureListener> listener_;
  std::mutex announced_mutex_;
  std::deque<std::shared_ptr<Work>> announced_;  // and not known to have ended
  std::unique_ptr<std::thread> thread_;
  const unsigned generation_ = fork_generation();
};

// The watchdog of the backend that reduces the group's tensors on that kind of device; null if that is ring itself, or
// if ring is not in the group at all. Lives at least as long as the group's ring.
std::shared_ptr<BackendWatchdog> watchdog_of(c10d::ProcessGroup& group, c10::DeviceType device);

}  // namespace ringdp
