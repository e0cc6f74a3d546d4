// StepGuard: refuses what does not fit the state of the reducer's backward: a forward while the last backward is
// unfinished, anything after a failure, and changes of compression in the middle of a step. Owned by the Reducer, used
// under its lock.
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
  // DDP's error, where a backward did not come to its end. One of which nothing was sent is as if it had never begun.
  // `notify`: the other ranks learn of it.
  void throw_if_unfinished(bool notify);
  // Throws what `refusal` says during a backward, also one that an exception left.
  void refuse_in_backward(const char* refusal) const;
  // Compression may change neither in a backward nor between a forward and its backward.
  void refuse_change_of_compression() const;

  // For DDP's logging data: the text of the last thing that the reducer threw, and of what a backward ended with.
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
