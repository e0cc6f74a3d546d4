// Reducer: the way of the gradients in a backward. Where a gradient arrives it is written into its bucket; full buckets are
// launched in index order; the end of backward waits for them, and hands the means out. One step: prepare_for_forward and
// prepare_for_backward arm it; backward_began begins; for each gradient take_gradient, then gradient_arrived; end_backward.
//
// What is reduced and how is GradientLayout's. ArrivalTracker says which bucket may leave, UsedMap which parameters some rank
// has used, JoinShadow what ranks without input do.
//
// Owned by RingDP (Python). Called by the forward's thread and by the threads that run backward, under one recursive lock,
// which the parts never see; everything that can block runs without the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "torch/reducer/arrival_tracker.h"
#include "torch/reducer/backward_state.h"
#include "torch/reducer/gradient_hooks.h"
#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/join_shadow.h"
#include "torch/reducer/reducer_errors.h"
#include "torch/reducer/reducer_stats.h"
#include "torch/reducer/step_guard.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

class Reducer final : public GradientListener, public std::enable_shared_from_this<Reducer> {
 public:
  using Lock = std::unique_lock<std::recursive_mutex>;

  // A part of the reducer; the lock is held while this lives.
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
  Reducer(std::vector<ModuleParameter> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options);

  // ---- Forward.
  // Throws if the last backward did not finish. Plans anew if parameters were frozen or unfrozen since.
  void prepare_for_forward();
  bool rebuild_buckets();  // once, after the first backward: true
  void prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync);
  // The next backward synchronises even if its forward ran with sync = false.
  void demand_sync();
  void check_finalized();

  // ---- Backward.
  bool take_gradient(std::size_t parameter, const at::Tensor& gradient) override {
    return layout_.store.take(parameter, gradient);
  }
  void gradient_arrived(std::size_t parameter) override;
  void backward_began(bool sync) override;
  void hook_failed(const std::string& text) override { guard()->note_thrown(text); }
  // The end of backward waits for these, too.
  void install_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures);
  // The plain sum, for hooks that divide themselves; without the lock.
  FuturePointer sum(const c10d::GradBucket& bucket) { return layout_.buckets.sum(bucket); }
  // On a rank that has run out of input (join): the collectives that follow the buckets.
  void shadow_end_of_backward();

  // ---- Between steps: all ranks do the same.
  // The module has other parameters from now on, on which the ranks have agreed. The caller sets reductions again.
  void replace_parameters(std::vector<ModuleParameter> parameters);
  void set_reductions(ReductionPlan reductions);
  void register_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void set_static_graph();
  void set_optimizer_in_backward() { optimizer_in_backward_ = true; }
  void set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared);
  void reset();

  // ---- The parts, for the bindings.
  Locked<GradientLayout> layout() { return {Lock(mutex_), layout_}; }
  // Throws what `refusal` says during a backward.
  Locked<GradientLayout> layout_between_steps(const char* refusal);
  Locked<JoinShadow> join() { return {Lock(mutex_), join_}; }
  Locked<StepGuard> guard() { return {Lock(mutex_), guard_}; }
  Locked<const ArrivalTracker> arrivals() { return {Lock(mutex_), arrivals_}; }
  Locked<const BackwardState> backward() { return {Lock(mutex_), backward_}; }
  Locked<const StepTimes> times() { return {Lock(mutex_), times_}; }

 private:
  bool recomputing() const;
  void note_other_parameters();

  void begin();
  std::vector<std::size_t> never_to_come() const;
  void write_to_bucket(std::size_t parameter, bool late = false);
  void mark_ready(std::size_t parameter);
  void launch(Bucket& bucket);

  void end_backward();
  void wait_for_buckets(std::size_t first, std::size_t end);
  void send_late_buckets();
  void hand_out();
  void exchange_order();
  void commit_hooks(Lock lock, HookVerdicts hooks);
  template <class Action>
  void noting_failure(int64_t bucket, const std::string& name, Action&& action);

  std::recursive_mutex mutex_;  // a Python hook runs under it and may ask for stats
  GradientLayout layout_;
  ArrivalTracker arrivals_{layout_.plan};
  BackwardState backward_;
  UsedMap used_{layout_.parameters, arrivals_, layout_.group, layout_.options.unused};
  JoinShadow join_{layout_, used_};
  StepGuard guard_{layout_, arrivals_, backward_};
  StepTimes times_;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures_;
  bool optimizer_in_backward_ = false;
};

}  // namespace ringdp
