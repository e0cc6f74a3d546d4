// BetweenSteps: what changes between two steps: parameters are frozen or replaced, buckets follow the order of the
// gradients, reductions, hooks or the group become others. All ranks make the same changes. What does not fit the
// state of the backward is refused, and what is known of the old parameters is forgotten. Owned by the Reducer, used
// under its lock, by the program's thread without the GIL.
#pragma once

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "torch/reducer/arrival_tracker.h"
#include "torch/reducer/backward_state.h"
#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/reducer_stats.h"
#include "torch/reducer/step_failure.h"
#include "torch/reducer/step_guard.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

class BetweenSteps {
 public:
  BetweenSteps(GradientLayout& layout, ArrivalTracker& arrivals, BackwardState& backward, UsedMap& used,
               StepFailure& failure, StepGuard& guard, StepTimes& times);

  // ---- At a forward. True: the plan of the buckets is another one.
  void follow_requires_grad();
  bool follow_learned_order();
  // Its batch weighs that much; see GradientWeights.
  // `training`: the module's mode, where the ranks' forwards are to be compared.
  void announce_weight(double weight, bool sync, std::optional<bool> training);
  void repeat_batch() {
    layout_.weights.repeat();
    backward_.forwards().settle();
  }

  // ---- By the program. The module has other parameters from now on, on which the ranks have agreed. The caller sets
  // reductions again. Returns the reductions of before, to be released without the lock: Python is told.
  ReductionPlan replace_parameters(std::vector<ModuleParameter> parameters);
  // `reductions` are those of before when it returns, to be released without the lock: Python is told.
  void set_reductions(ReductionPlan& reductions);
  void choose(const std::vector<int>& reduction_of_bucket);
  // A hook that is refused stays the caller's: Python's goes without the lock.
  void register_hook(std::unique_ptr<c10d::CommHookInterface>&& hook);
  void set_static_graph();
  void set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared);
  // Throws what `refusal` says during a backward.
  GradientCompression& compression(const char* refusal);

 private:
  void note_other_parameters();

  GradientLayout& layout_;
  ArrivalTracker& arrivals_;
  BackwardState& backward_;
  UsedMap& used_;
  StepFailure& failure_;
  StepGuard& guard_;
  StepTimes& times_;
};

}  // namespace ringdp
