// StepGuard: refuses calls that the state of the backward forbids: a forward while the last backward is unfinished,
// any call after a failure, and changes of compression in the middle of a step. Owned by the Reducer, used under its
// lock.
#pragma once

#include <string>
#include <utility>

#include "torch/reducer/arrival_tracker.h"
#include "torch/reducer/backward_state.h"
#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/step_failure.h"

namespace ringdp {

class StepGuard {
 public:
  StepGuard(GradientLayout& layout, const ArrivalTracker& arrivals, BackwardState& backward, const StepFailure& failure)
      : layout_(layout), arrivals_(arrivals), backward_(backward), failure_(failure) {}

  void throw_if_failed() const;
  // Throws DDP's error if the last backward did not end. One that has sent nothing is reset instead. `notify`: fails
  // the other ranks' wait.
  void throw_if_unfinished(bool notify);
  // Throws `refusal` during a backward, or after one that an exception ended.
  void refuse_in_backward(const char* refusal) const;
  // Throws in a backward, and between a forward and its backward, when compression must not change.
  void refuse_change_of_compression() const;

  // For DDP's logging data: the texts of the reducer's last exception, and of that which ended a backward.
  void note_thrown(std::string text) { thrown_ = std::move(text); }
  const std::string& thrown() const { return thrown_; }

 private:
  GradientLayout& layout_;
  const ArrivalTracker& arrivals_;
  BackwardState& backward_;
  const StepFailure& failure_;
  std::string thrown_;
};

}  // namespace ringdp
