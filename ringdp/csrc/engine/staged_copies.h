// StagedCopies: operations whose memory mirrors a device's. It polls their copies, starts and advances operations as
// their input comes, and keeps the buffers of ended ones until their last copy is done. It polls because a device's
// callbacks would need a thread and locks; while input is being copied the driver sleeps only for short times. Owned
// by the Engine. Used by the thread that drives: called by Progress.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "base/deadline.h"
#include "device/staging.h"
#include "engine/completion.h"
#include "engine/driver_role.h"
#include "engine/failure_agreement.h"
#include "engine/group_table.h"
#include "engine/pending_copies.h"

namespace ringdp {

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
