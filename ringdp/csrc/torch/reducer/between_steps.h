// BetweenSteps: changes between two steps: parameters are frozen or replaced, buckets follow the order of the
// gradients, reductions, hooks or the group are replaced. All ranks make the same changes. A change that the state of
// the backward forbids is refused, and state of old parameters is dropped. Owned by the Reducer, used under its lock,
// by the program's thread without the GIL.
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

  // ---- At a forward. True: the plan of the buckets has changed.
  void follow_requires_grad();
  bool follow_learned_order();
  // `weight` of its batch: see GradientWeights. `training`: the module's mode, if the ranks' forwards are compared.
  void announce_weight(double weight, bool sync, std::optional<bool> training);
  void repeat_batch() {
    layout_.weights.repeat();
    backward_.forwards().settle();
  }

  // ---- By the program. Replaces the parameters, on which the ranks have agreed. The caller sets reductions again.
  // Returns the old reductions, to be released without the lock, since they call Python.
  ReductionPlan replace_parameters(std::vector<ModuleParameter> parameters);
  // On return `reductions` are the old ones, to be released without the lock, since they call Python.
  void set_reductions(ReductionPlan& reductions);
  void choose(const std::vector<int>& reduction_of_bucket);
  // A refused hook stays with the caller, which releases it without the lock.
  void register_hook(std::unique_ptr<c10d::CommHookInterface>&& hook);
  void set_static_graph();
  void set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared);
  // Throws `refusal` during a backward.
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
