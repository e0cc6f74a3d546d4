// Reducer: averages the gradients of a backward. An arriving gradient is written into its bucket; full buckets are
// launched in index order; the end of backward waits for them, and hands out the means. One step: prepare_for_forward
// and prepare_for_backward arm it; backward_began begins; for each gradient take_gradient, then gradient_arrived;
// end_backward.
//
// Invariant: a Step exists from the beginning of a backward that averages to its end. What outlives the steps is in
// the Plan (which gradient goes where), the Buckets (their memory), the Exchange (what is sent) and the StepReport.
// Owned by RingDP (Python). Called by the forward's thread and by the threads that run backward, under one recursive
// lock, taken by Reducer and by StepFailure; calls that can block run without the GIL.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "torch/backend/backward_unit.h"
#include "torch/reducer/buckets.h"
#include "torch/reducer/exchange.h"
#include "torch/reducer/forwards.h"
#include "torch/reducer/gradient_hooks.h"
#include "torch/reducer/plan.h"
#include "torch/reducer/step.h"
#include "torch/reducer/step_report.h"

namespace ringdp {

class Reducer final : public GradientListener, public std::enable_shared_from_this<Reducer> {
 public:
  using Lock = ReducerLock;

  // Access to a part of the reducer, which holds the lock.
  template <class Part>
  class Locked {
   public:
    Locked(Lock lock, Part& part) : lock_(std::move(lock)), part_(&part) {}
    Part* operator->() const { return part_; }
    Part& operator*() const { return *part_; }
    // Gives the lock on to a part of the part.
    template <class Inner>
    Locked<Inner> part(Inner Part::* inner) && {
      return {std::move(lock_), part_->*inner};
    }

   private:
    Lock lock_;
    Part* part_;
  };

  // `parameters`: all of the module's, also those that do not require grad now.
  Reducer(std::vector<ModuleParameter> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options);

  // ---- Forward.
  // Throws if the last backward did not finish. Plans anew if parameters were frozen or unfrozen since.
  void prepare_for_forward();
  bool rebuild_buckets();  // once, after the first backward: true
  // `weight` of its batch: see GradientWeights. `training`: the module's mode, if the ranks' forwards are compared.
  void announce_weight(double weight, bool sync, std::optional<bool> training);
  // `training`: the module's mode, if the ranks compare this forward's backward (see Forwards).
  void prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync, std::optional<bool> training);
  // The next backward synchronises even if its forward ran with sync = false.
  void demand_sync();
  void check_finalized();
  void repeat_batch();

  // ---- Backward.
  at::Tensor take_gradient(std::size_t parameter, const at::Tensor& gradient) override {
    return buckets_.store.take(parameter, gradient);
  }
  void gradient_arrived(std::size_t parameter) override;
  void backward_began(Forward& forward) override;
  void hook_failed(const std::string& text) override { note_thrown(text); }
  // The plain sum, for hooks that divide it themselves; without the lock.
  FuturePointer sum(const c10d::GradBucket& bucket) { return exchange_.buckets.sum(bucket); }
  // A forward that checkpointing repeats inside a backward.
  void called_in_backward();
  // The next end of a backward also waits for these.
  void install_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures);
  // On a rank that has run out of input (join): the collectives after the buckets.
  void shadow_end_of_backward();

  // ---- Between two steps, by the program. All ranks make the same changes. A change that the state of the backward
  // forbids is refused.
  // Replaces the parameters, on which the ranks have agreed. The caller sets reductions again. Returns the old
  // reductions, to be released without the lock, since they call Python.
  ReductionPlan replace_parameters(std::vector<ModuleParameter> parameters);
  // On return `reductions` are the old ones, to be released without the lock, since they call Python.
  void set_reductions(ReductionPlan& reductions);
  void choose(const std::vector<int>& reduction_of_bucket);
  // A refused hook stays with the caller, which releases it without the lock. Also used by RingDP's own hooks, for
  // mixed precision and optimizers in backward.
  void register_hook(std::unique_ptr<c10d::CommHookInterface>&& hook);
  void set_static_graph();
  void set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared);
  // The program's optimizer runs within backward: a .grad that it has set to None stays None.
  void set_optimizer_in_backward();
  // In an elastic job that has new members: as these, with buckets that are not ordered yet. `step`: the last one of
  // the others. Residuals stay.
  void begin_again(int64_t step);
  // In an elastic job: called at the end of each backward whose step counts, when .grad has the means. Without the
  // lock.
  void when_counted(std::function<void()> call) { when_counted_ = std::move(call); }
  // The residuals, for the program; throws `refusal` during a backward.
  Locked<GradientCompression> residuals(const char* refusal);
  void zero_gradients();
  // Drops the present backward, and the failure.
  void reset();

  // Whether a .grad has a gradient that was not averaged. Any thread, without the lock.
  bool any_left_over() const { return buckets_.left_over.any(); }
  // Parameters in the order of the last backward.
  std::vector<std::size_t> arrivals();
  // For DDP's logging data: the texts of the reducer's last exception, and of that which ended a backward.
  void note_thrown(std::string text);
  std::string thrown();

  // ---- The parts, for the bindings.
  Locked<const Plan> plan() { return {Lock(mutex_), plan_}; }
  Locked<Buckets> buckets() { return {Lock(mutex_), buckets_}; }
  Locked<Exchange> exchange() { return {Lock(mutex_), exchange_}; }
  Locked<JoinShadow> join() { return {Lock(mutex_), join_}; }
  Locked<StepReport> report() { return {Lock(mutex_), report_}; }

 private:
  class Unit;

  bool recomputing() const;
  void begin(double weight, bool again);
  void end_backward();
  void hand_out(const std::shared_ptr<Step>& step, Lock& lock, HookVerdicts& hooks);

  // Throws DDP's error if the last backward did not end. One that has sent nothing is dropped instead. `notify`: fails
  // the other ranks' wait.
  void throw_if_unfinished(bool notify);
  // Throws `refusal` during a backward, or after one that an exception ended.
  void refuse_in_backward(const char* refusal) const;
  // Throws in a backward, and between a forward and its backward, when compression must not change.
  void refuse_change_of_compression() const;
  void check_reductions(const ReductionPlan& reductions) const;
  void follow_requires_grad();
  void start();

  std::recursive_mutex mutex_;  // recursive: a Python hook runs under it and may ask for stats
  ReducerGroup group_;
  Plan plan_;
  Exchange exchange_;
  Buckets buckets_;
  StepReport report_;
  JoinShadow join_;
  Demand demand_;
  std::shared_ptr<Step> step_;  // shared with the thread that ends it; null: no backward that averages is in progress
  const std::shared_ptr<Unit> unit_;
  std::vector<std::size_t> last_order_;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures_;
  bool optimizer_in_backward_ = false;
  std::function<void()> when_counted_;
  std::string thrown_;
};

}  // namespace ringdp
