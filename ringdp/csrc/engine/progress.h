// Progress: the driver's loop: it takes submitted operations, starts them, moves bytes, retires complete ones, checks
// deadlines, and sleeps when nothing moves. It never takes Python's lock, except in the interrupt check: tensors are
// released by the waiting thread or by a completion thread. Owned by the Engine, which calls it. Used by the thread
// that drives, except `submit`.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "collective/scratch.h"
#include "engine/completion.h"
#include "engine/driver_role.h"
#include "engine/engine_options.h"
#include "engine/failure_agreement.h"
#include "engine/group_table.h"
#include "engine/message_matching.h"
#include "engine/peer_links.h"
#include "engine/staged_copies.h"
#include "engine/stall_monitor.h"
#include "transport/poller.h"

namespace ringdp {

class Progress {
 public:
  // Works with the other parts of the same engine, which outlive it.
  Progress(DriverRole& role, Poller& poller, GroupTable& groups, PeerLinks& links, FailureAgreement& failures,
           StallMonitor& stalls, StagedCopies& copies, CompletionQueue& completions, OperationRecorder& recorder,
           const EngineOptions& options);

  // Any thread, with the mutex of the role held. `caller_waits`: see DriverRole::operation_began.
  void submit(const GroupPtr& group, InFlight in_flight, bool caller_waits);
  // Takes the operations submitted since the last call, and runs the requests of other threads.
  void take_inbox();

  // Drives until `over`, or until the deadline has passed; without it, until no work is left but resting operations.
  // `spin_us`: how long it polls before it sleeps. May throw an exception of the interrupt check.
  using Over = std::function<bool()>;
  void drive(const Over& over, Deadline deadline, int64_t spin_us);
  // Moves what can be moved, without waiting.
  void move_on();
  // The same after events of the poller, for a thread that will wait for the next ones (DriverRole::watch).
  void look_for_events();
  // Looks once at all links and operations, as a thread when no other drives, or as a driver that polls only some
  // links.
  void look_at_all();

  // Does nothing in a failing group, whose queued operations fail with it; nor before the input has come (StagedCopies
  // calls again), nor while an earlier operation uses the same memory (`retire` calls again).
  void start(GroupState& group, InFlight& in_flight);
  // Ends the operations of a failed group, see FailureAgreement::EndOperations.
  void end_operations(GroupState& group, const std::exception_ptr& failure, uint64_t cause);

 private:
  bool poll_on(Clock::time_point end) RINGDP_REQUIRES(role_);
  bool advance_groups();  // starts and retires; true if anything changed
  bool start_next(GroupState& group);
  bool retire(GroupState& group);
  void conclude(InFlight& in_flight);
  void finish(InFlight& in_flight, const std::exception_ptr& error);
  void sleep(const Over& over, Deadline deadline) RINGDP_REQUIRES(role_);
  void set_timer();
  void check_deadlines();
  Deadline next_deadline() const;

  DriverRole& role_;
  Poller& poller_;
  GroupTable& groups_;
  PeerLinks& links_;
  FailureAgreement& failures_;
  StallMonitor& stalls_;
  StagedCopies& copies_;
  CompletionQueue& completions_;
  OperationRecorder& recorder_;
  const EngineOptions& options_;
  MessageMatching messages_;
  ScratchPool scratch_ RINGDP_GUARDED_BY(role_);
  std::vector<std::pair<GroupPtr, InFlight>> inbox_ RINGDP_GUARDED_BY(role_.mutex());
  Clock::time_point crowded_until_ RINGDP_GUARDED_BY(role_){};  // another process uses this core: no polling before
  int yields_used_ RINGDP_GUARDED_BY(role_) = 0;                // in a row, by another process
  std::size_t working_ RINGDP_GUARDED_BY(role_) = 0;  // operations taken from the inbox, without those that rest
  unsigned turns_ RINGDP_GUARDED_BY(role_) = 0;       // rounds of the driver, whichever thread it was
  Clock::time_point interrupt_check_ RINGDP_GUARDED_BY(role_){};  // the last one of a sleeping driver
};

}  // namespace ringdp
