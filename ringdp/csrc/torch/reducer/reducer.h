// Reducer: averages the gradients of a backward. An arriving gradient is written into its bucket; full buckets are
// launched in index order; the end of backward waits for them, and hands out the means. One step: prepare_for_forward
// and prepare_for_backward arm it; backward_began begins; for each gradient take_gradient, then gradient_arrived;
// end_backward.
//
// GradientLayout has the parts that are constant in a step. BucketFiller takes the gradients, BackwardEnd hands out
// the means, BetweenSteps makes changes; ArrivalTracker decides which bucket to launch, UsedMap has the parameters
// that some rank has used, JoinShadow acts for ranks without input, StepGuard refuses calls.
//
// Owned by RingDP (Python). Called by the forward's thread and by the threads that run backward, under one recursive
// lock, taken by Reducer and by StepFailure; calls that can block run without the GIL.
//
// StepUnit: the reducer's step in an elastic job, for the BackwardUnit that decides whether it counts: the step counts
// when all members have its means; if a member is lost before that, the survivors repeat the reduction from their
// gradients (StepRepair). Owned by the Reducer, whose lock its methods take; called without the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "torch/backend/backward_unit.h"
#include "torch/reducer/backward_end.h"
#include "torch/reducer/backward_state.h"
#include "torch/reducer/between_steps.h"
#include "torch/reducer/bucket_filler.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/gradient_hooks.h"
#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/reducer_stats.h"
#include "torch/reducer/step_failure.h"
#include "torch/reducer/step_report.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

class Reducer;

class StepUnit final : public BackwardUnit::Step {
 public:
  explicit StepUnit(Reducer& reducer) : reducer_(reducer) {}

  int64_t number() override;
  const char* also_lost() override;
  bool must_send_again() override;
  void send_again() override;
  std::vector<double> weights() override;
  void wait() override;
  void counts() override;
  [[noreturn]] void stopped() override;

 private:
  Reducer& reducer_;
  std::optional<std::vector<int32_t>> order_;  // BackwardEnd::ask_for_order
};

class Reducer final : public GradientListener, public std::enable_shared_from_this<Reducer> {
 public:
  using Lock = std::unique_lock<std::recursive_mutex>;

  // Access to a part of the reducer, which holds the lock.
  template <class Part>
  class Locked {
   public:
    Locked(Lock lock, Part& part) : lock_(std::move(lock)), part_(&part) {}
    Part* operator->() const { return part_; }
    Part& operator*() const { return *part_; }

   private:
    Lock lock_;
    Part* part_;
  };

  // `parameters`: all of the module's, also those that do not require grad now.
  Reducer(std::vector<ModuleParameter> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options)
      : layout_(std::move(parameters), std::move(group), std::move(options), *this) {
    if (layout_.repair.on())
      failure_.let_losses_pass([this] { return is_loss(layout_.repair.elastic().group()->failure()); });
  }

  // ---- Forward.
  // Throws if the last backward did not finish. Plans anew if parameters were frozen or unfrozen since.
  void prepare_for_forward();
  bool rebuild_buckets();  // once, after the first backward: true
  // `training`: the module's mode, if the ranks compare this forward's backward (see Forwards).
  void prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync, std::optional<bool> training);
  // The next backward synchronises even if its forward ran with sync = false.
  void demand_sync();
  void check_finalized();

  // ---- Backward.
  at::Tensor take_gradient(std::size_t parameter, const at::Tensor& gradient) override {
    return layout_.store.take(parameter, gradient);
  }
  void gradient_arrived(std::size_t parameter) override;
  void backward_began(Forward& forward) override;
  void hook_failed(const std::string& text) override { guard()->note_thrown(text); }
  // The plain sum, for hooks that divide it themselves; without the lock.
  FuturePointer sum(const c10d::GradBucket& bucket) { return layout_.buckets.sum(bucket); }
  // A forward that checkpointing repeats inside a backward.
  void called_in_backward();
  // On a rank that has run out of input (join): the collectives after the buckets.
  void shadow_end_of_backward();

  // Whether a .grad has a gradient that was not averaged. Any thread, without the lock.
  bool any_left_over() const { return layout_.left_over.any(); }

  // Drops the present backward, and the failure.
  void reset();

  // ---- The parts, for the bindings.
  Locked<GradientLayout> layout() { return {Lock(mutex_), layout_}; }
  Locked<BetweenSteps> between_steps() { return {Lock(mutex_), between_steps_}; }
  Locked<BackwardEnd> end() { return {Lock(mutex_), end_}; }
  Locked<JoinShadow> join() { return {Lock(mutex_), join_}; }
  Locked<StepGuard> guard() { return {Lock(mutex_), guard_}; }
  Locked<const ArrivalTracker> arrivals() { return {Lock(mutex_), arrivals_}; }
  Locked<BackwardState> backward() { return {Lock(mutex_), backward_}; }
  Locked<StepReport> report() { return {Lock(mutex_), report_}; }

 private:
  friend class StepUnit;

  bool recomputing() const;
  void begin(double weight, bool again);
  void end_backward();
  void wait_for_means(Lock& lock);
  void hand_out(Lock lock, HookVerdicts& hooks);
  void end_step(Lock lock, HookVerdicts& hooks);

  std::recursive_mutex mutex_;  // recursive: a Python hook runs under it and may ask for stats
  BackwardState backward_;
  StepFailure failure_{mutex_, backward_};
  GradientLayout layout_;
  ArrivalTracker arrivals_{layout_.plan};
  UsedMap used_{layout_.parameters, arrivals_, layout_.group, layout_.options.unused};
  JoinShadow join_{layout_, used_};
  StepGuard guard_{layout_, arrivals_, backward_, failure_};
  StepTimes times_;
  StepReport report_{layout_, times_, layout_.options.report_every};
  BucketFiller filler_{layout_, arrivals_, backward_, used_, failure_, times_, report_};
  BackwardEnd end_{layout_, arrivals_, backward_, used_, join_, failure_, times_, filler_};
  StepUnit unit_{*this};
  BetweenSteps between_steps_{layout_, arrivals_, backward_, used_, failure_, guard_, times_};
  StepTimes::Clock::time_point gradients_done_;  // of the ending step
  BackwardEnd::Missing missing_;                 // of the ending step
};

}  // namespace ringdp
