// StagedCopies: operations whose memory mirrors a device's. It polls their copies, starts and advances operations as
// their input comes, and keeps the buffers of ended ones until their last copy is done. It polls because a device's
// callbacks would need a thread and locks; while input is being copied the driver sleeps only for short times. Owned
// by the Engine. Used by the thread that drives: called by Progress.
//
// PendingCopies: keeps the buffers of ended operations while copies to or from a device use them. A work is done when
// its last copy back is queued; until that copy has ended, even after a failure in the middle of the copies, the
// memory must not be reused. Owned by the engine; used by the thread that drives it. The buffers of a copy that never
// ends are never freed.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "device/staging.h"
#include "engine/completion.h"
#include "engine/driver_role.h"
#include "engine/failure_agreement.h"
#include "engine/group_table.h"

namespace ringdp {

class PendingCopies {
 public:
  ~PendingCopies();

  void wait_for(std::shared_ptr<Staging> staging, std::shared_ptr<void> buffers);
  // Passes the buffers whose copies have ended to `release`, which drops them on a thread that may take Python's lock.
  void look(const std::function<void(std::shared_ptr<void>)>& release);
  bool empty() const { return under_way_.empty(); }

 private:
  struct PendingCopy {
    std::shared_ptr<Staging> staging;  // shared with the caller's work, which orders streams after it
    std::shared_ptr<void> buffers;     // with the caller
  };
  std::vector<PendingCopy> under_way_;
  std::vector<PendingCopy> lost_;  // the device does not report their end any more
};

class StagedCopies {
 public:
  // `start`: called with an operation that has enough input to start.
  using Start = std::function<void(GroupState&, InFlight&)>;

  StagedCopies(const DriverRole& role, const GroupTable& groups, FailureAgreement& failures,
               CompletionQueue& completions, Start start);

  // An operation with a staging was added, or is over; null: it has none.
  void add(const Staging* staging);
  void retire(std::shared_ptr<Staging> staging, const std::shared_ptr<void>& buffers);

  bool look();                    // true if a copy has ended
  bool under_way() const;         // of operations that are over
  Clock::time_point next_look();  // when a sleeping driver must poll again; max(): no copy is pending

 private:
  bool look_at(GroupState& group, InFlight& in_flight) RINGDP_REQUIRES(role_);

  const DriverRole& role_;
  const GroupTable& groups_;
  FailureAgreement& failures_;
  CompletionQueue& completions_;  // drops buffers, which may take Python's lock
  const Start start_;
  std::size_t staged_ RINGDP_GUARDED_BY(role_) = 0;  // operations
  bool waiting_ RINGDP_GUARDED_BY(role_) = false;    // one of them waits for input
  Clock::time_point moved_at_ RINGDP_GUARDED_BY(role_){};
  PendingCopies pending_ RINGDP_GUARDED_BY(role_);
};

}  // namespace ringdp
