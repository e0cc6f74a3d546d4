// StepUnit: the end of a backward in an elastic job, from the last gradient to the means. The step counts when all members have its
// means; a member that is lost before that is left out, and the survivors begin at their gradients (StepRepair).
// Owned by the Reducer, which calls it under its lock, without the GIL.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "torch/reducer/backward_end.h"
#include "torch/reducer/backward_state.h"
#include "torch/reducer/bucket_filler.h"
#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/step_failure.h"
#include "torch/reducer/step_report.h"

namespace ringdp {

class StepUnit {
 public:
  using Lock = std::unique_lock<std::recursive_mutex>;

  StepUnit(GradientLayout& layout, const BackwardState& backward, StepFailure& failure, BucketFiller& filler,
           BackwardEnd& end, StepReport& report)
      : layout_(layout), backward_(backward), failure_(failure), filler_(filler), end_(end), report_(report) {}

  bool on() const { return layout_.repair.on(); }
  // Returns when the buckets hold the means. Lets go of the lock while it waits. `reset`: forgets the backward; called before
  // Error(kMembership) is thrown on, after which the program may go on.
  void make(Lock& lock, const BackwardEnd::Missing& missing, const std::function<void()>& reset);

 private:
  using Order = std::optional<std::vector<int32_t>>;  // BackwardEnd::ask_for_order

  bool try_once(Lock& lock, Order& order, bool again);  // true: the step counts

  GradientLayout& layout_;
  const BackwardState& backward_;
  StepFailure& failure_;
  BucketFiller& filler_;
  BackwardEnd& end_;
  StepReport& report_;
};

}  // namespace ringdp
