// StepGuard: refuses what does not fit the state of the reducer's backward: a forward while the last backward is unfinished,
// anything after a failure, and changes of compression in the middle of a step. It keeps the first failure.
// Owned by the Reducer, used under its lock.
#pragma once

#include <string>
#include <utility>

#include "torch/reducer/arrival_tracker.h"
#include "torch/reducer/backward_state.h"
#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/reducer_errors.h"

namespace ringdp {

class StepGuard {
 public:
  StepGuard(GradientLayout& layout, const ArrivalTracker& arrivals, BackwardState& backward)
      : layout_(layout), arrivals_(arrivals), backward_(backward) {}

  // The text of an exception, by which the ranks no longer agree. The first one counts.
  void keep(std::string text) {
    if (failed_.empty()) failed_ = std::move(text);
  }
  // Runs `action`, and keeps what it throws.
  template <class Action>
  auto keeping(Action&& action) {
    try {
      return std::forward<Action>(action)();
    } catch (...) {
      keep(current_error_text());
      throw;
    }
  }
  void reset() { failed_.clear(); }

  void throw_if_failed() const;
  // DDP's error, where a backward did not come to its end. One of which nothing was sent is as if it had never begun. `notify`:
  // the other ranks learn of it.
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
  std::string failed_;
  std::string thrown_;
};

}  // namespace ringdp
