// BetweenSteps: changes between two steps: parameters are frozen or replaced, buckets follow the order of the
// gradients, reductions, hooks or the group are replaced. All ranks make the same changes. A change that the state of
// the backward forbids is refused, and state of old parameters is dropped. Owned by the Reducer, used under its lock,
// by the program's thread without the GIL.
//
// StepGuard: refuses calls that the state of the backward forbids: a forward while the last backward is unfinished,
// any call after a failure, and changes of compression in the middle of a step. Owned by the Reducer, used under its
// lock.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "torch/reducer/backward_state.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/reducer_stats.h"
#include "torch/reducer/step_failure.h"
#include "torch/reducer/used_map.h"

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
