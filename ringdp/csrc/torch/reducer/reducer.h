// Reducer: decides when gradients leave. It counts the gradients that have arrived, launches buckets in index order, and waits
// for them at the end of backward. A gradient is copied into its bucket when it arrives, and .grad becomes that part of the
// bucket: no pass to zero the bucket, no addition, no copy back. A large gradient is a bucket by itself, reduced where
// autograd left it. Where a parameter already has a .grad, autograd accumulates into it as ever.
//
// One step: prepare_for_forward and prepare_for_backward arm it; backward_began begins; for each gradient take_gradient, then
// gradient_arrived, which writes it to its bucket and launches the buckets that are full, in order; end_backward waits, reads
// which parameters were used, commits residuals and hands the results out. BucketReducer reduces one bucket; its memory is
// reducer_bucket.h; the layout is reducer_layout.cpp; compression is reducer_reductions.cpp and reducer_choice.cpp.
//
// Owned by RingDP (Python). Called by the forward's thread and by the threads that run backward, under one recursive lock;
// everything that can block runs without the GIL.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch/reducer/arrival_tracker.h"
#include "torch/reducer/backward_state.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/bucket_reducer.h"
#include "torch/reducer/bucket_store.h"
#include "torch/reducer/gradient_hooks.h"
#include "torch/reducer/messages.h"
#include "torch/reducer/reducer_errors.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/residuals.h"
#include "torch/reducer/trainable_parameters.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

struct ReducerOptions {
  std::vector<std::size_t> caps_bytes;  // see assign_buckets
  UnusedParameters unused = UnusedParameters::kFinish;
  bool average = false;            // see BucketReducer
  bool graph_shows_unused = true;  // false where parameters are not leaves of the graph: _autograd_hook reports them
  bool own_gradients = false;      // .grad is never a part of a bucket: copied in, and the mean copied back
  bool skip_unused = false;        // buckets for which no rank has gradients are not sent
  bool host_control = false;    // control data goes over the group's ring, from the CPU, without waiting for a device
  bool names_compared = false;  // the backend raises on all ranks where an operation's names differ
  std::optional<c10::ScalarType> reduce_dtype;  // of the exact buckets; a gradient of another one is cast in and back
};

// Timings of the last synchronised backward, and running totals. Host clock only, no device sync.
struct ReducerStats {
  int64_t steps = 0;
  int64_t buckets = 0;
  int64_t bytes = 0;          // gradients of one step
  double backward_s = 0;      // from the first output or gradient to the last gradient
  double exposed_wait_s = 0;  // the end of backward waited for communication
  double total_backward_s = 0;
  double total_exposed_wait_s = 0;
  // When that backward began, launched its first bucket, had its last gradient, and ended: ns of the steady clock.
  int64_t began_ns = 0;
  int64_t launched_ns = 0;
  int64_t computed_ns = 0;
  int64_t finished_ns = 0;
  int64_t unused_bytes = 0;  // of parameters without gradient on this rank
};

// The cost of one bucket the last time it was sent.
struct BucketRow {
  std::size_t index = 0;
  std::string name;
  int reduction = -1;                   // -1: exact
  bool free = false;                    // `choose` may give it another
  std::vector<std::size_t> parameters;  // of the module, in the order of the buffer
  std::size_t numel = 0;                // gradients
  std::size_t bytes_before = 0;         // of the gradients in the bucket's dtype
  std::size_t bytes_after = 0;          // of the codes of one rank's gradients; for reductions that are hooks as before
  double launched_s = 0;                // when it was launched, from the first bucket of that backward on
  double coding_s = 0;                  // spent on encoding and decoding in the core
  double seconds = 0;                   // from launch until it was reduced
  double exposed_s = 0;                 // for which the end of backward waited for it
};

// The reductions of parameters that are not reduced exactly; the vectors are indexed by parameter of the module.
struct ReductionPlan {
  std::vector<std::shared_ptr<Reduction>> reductions;
  std::vector<int> reduction_of;        // -1: exact
  std::vector<uint32_t> owner_offsets;  // which rank owns which part of a parameter: CompressedSection::owner_offset
  bool exchange_codes = false;          // codes go over c10d (c10d_compressed_all_reduce.h); the same on all ranks
};

class Reducer final : public GradientListener, public std::enable_shared_from_this<Reducer> {
 public:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::recursive_mutex>;

  // `parameters`: all of the module's, also those that do not require grad now.
  Reducer(std::vector<ModuleParameter> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options);
  ~Reducer() override;

  // Forward. Throws if the last backward did not finish. Makes the layout anew if parameters were frozen or unfrozen since;
  // throws on all ranks if they do not agree about that.
  void prepare_for_forward();
  // The module has other parameters from now on; called between steps by all ranks, which have agreed about it. Hooks
  // and buckets are made anew, as where parameters were unfrozen. Reductions and residuals belong to the old ones' numbers
  // and are dropped: the caller sets them again.
  void replace_parameters(std::vector<ModuleParameter> parameters);
  // By tensor: the number of the parameter of the module that it is, or -1.
  std::vector<int64_t> find(const std::vector<at::Tensor>& tensors) {
    const Lock lock(mutex_);
    return parameters_.find(tensors);
  }
  bool rebuild_buckets();  // once, after the first backward: true
  void prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync);
  // The next backward synchronises even if its forward ran with sync = false.
  void demand_sync();
  void check_finalized();

  // Backward.
  bool take_gradient(std::size_t parameter, const at::Tensor& gradient) override {
    return store_.take(parameter, gradient);
  }
  void gradient_arrived(std::size_t parameter) override;
  void backward_began(bool sync) override;
  // gradient_arrived, called by Python: `parameter` counts those that required grad at construction.
  void gradient_arrived_at(std::size_t parameter);
  void hook_failed(const std::string& text) override;

  void register_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void register_builtin_hook(BuiltinHook which);
  void set_static_graph();
  void set_optimizer_in_backward() { optimizer_in_backward_ = true; }
  void install_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures);
  void remove_hooks();

  // Reductions: see reducer_reductions.cpp. Residuals of parameters whose reduction stays the same are kept.
  void set_reductions(ReductionPlan plan);
  // By bucket, in the order of the layout: one of the plan's reductions in place of AutoReduction, or -1. Until the next layout.
  void choose(const std::vector<int>& reduction_of_bucket);
  // Residuals by parameter of the module, in units of this rank's gradient: float32 [numel], in the order of its memory.
  // take_residuals removes them; give_residuals overwrites them.
  std::map<std::size_t, at::Tensor> take_residuals(const std::vector<std::size_t>& parameters);
  void give_residuals(const std::map<std::size_t, at::Tensor>& residuals);
  void watch_finite(bool watch);
  // For torch's scaler; ringdp's calls note_loss_scale instead.
  void set_loss_scale(double scale);
  // This rank has no input and repeats the other ranks' collectives; so many ranks have input.
  void shadow_with(int64_t ranks_with_input);
  // Whether the last synchronised backward gave finite gradients, the same on all ranks; nullopt if it was not checked.
  std::optional<bool> finite();
  std::vector<std::size_t> non_finite();  // parameters of the module whose .grad is not finite; looks at all of them
  // In that backward, the first parameter of the module whose gradient on this rank was not finite; -1: none.
  int64_t own_non_finite();
  // By parameter of the module, float32 [numel] in the parameter's row-major order. Copies.
  std::map<std::size_t, at::Tensor> residuals();
  void set_residuals(const std::map<std::size_t, at::Tensor>& residuals);
  std::vector<BucketRow> bucket_rows();

  // zero_grad(set_to_none=False) for all parameters here: one pass per bucket where it can be.
  void zero_gradients() {
    const Lock lock(mutex_);
    store_.zero_gradients();
  }

  // For ranks that ran out of input (torch's Join).
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks);
  std::vector<c10d::GradBucket> zero_buckets();
  c10::intrusive_ptr<c10::ivalue::Future> shadow(c10d::GradBucket& bucket);
  c10::intrusive_ptr<c10::ivalue::Future> sum(const c10d::GradBucket& bucket) { return bucket_reducer_.sum(bucket); }
  void shadow_used_map();         // where the ranks send it in an operation of its own
  void shadow_end_of_backward();  // the collectives that follow the buckets

  void reset();
  void set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared);

  ReducerStats stats();
  std::vector<std::size_t> arrivals();  // parameters in the order of the last backward
  std::string error();                  // the text of the last thing this threw, and of what backward ended with
  void note_error(const std::string& text);
  std::vector<std::vector<std::size_t>> layout();
  std::vector<std::size_t> bucket_bytes();
  std::vector<std::string> bucket_names();  // what their operations are called
  bool rebuilt() const { return plan_.rebuilt(); }

 private:
  bool local() const { return group_.ranks() == 1 && !bucket_reducer_.has_hook(); }
  bool watches() const { return !local() || options_.unused == UnusedParameters::kForbidden; }
  bool recomputing() const;
  static int64_t nanoseconds(Clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  }
  void throw_if_unfinished(bool notify);

  void follow_requires_grad();
  void start();
  void average_left_over(const std::vector<std::size_t>& indices);
  Reduction* reduction_of(std::size_t param_index) const;
  PlannedGradient planned(std::size_t param_index) const;
  c10::ScalarType bucket_dtype(std::size_t param_index) const;
  std::vector<PlannedGradient> describe_gradients();
  void lay_out_again();
  int reduction_of_bucket(std::size_t bucket) const;
  Reduction* bucket_reduction(std::size_t bucket) const;
  bool has_residual(const Bucket& bucket) const;
  void add_residual(Bucket& bucket);
  void scale_owned_part(std::size_t param_index, const at::Tensor& residual, float factor) const;
  bool calls_back() const;

  void planned_anew();
  void count_traffic();
  void count_bucket(std::size_t index);
  void allocate();
  void hook_was_set();
  void set_hooks();

  void begin();
  void expect_only_what_the_graph_has();
  void write_to_bucket(std::size_t parameter, bool late = false);
  void mark_ready(std::size_t parameter);
  void launch_full_buckets();
  void launch(Bucket& bucket);
  void list_sections(Bucket& bucket, const at::Tensor& buffer, bool with_residuals);
  void refuse_hook_with_compression() const;
  void check_reductions(const ReductionPlan& plan);
  bool looks_for_non_finite() const;
  float residual_scale() const;
  using HookReductions = std::map<HookReduction*, std::optional<bool>>;  // whether each found its results finite
  HookReductions ask_hook_reductions();
  void finish_hook_reductions(const HookReductions& used);
  void divide_by(int64_t ranks_with_input);
  void look_at_reports(const HookReductions& hook_reductions);
  std::optional<bool> look_at_result(const Bucket& bucket);
  bool flag_result(const at::Tensor& result);
  void take_flag(Bucket& bucket);
  std::optional<bool> finite_now();
  void commit_residuals();
  int64_t parameter_at(const Bucket& bucket, const std::byte* address) const;
  bool sends_used_map() const;

  void end_backward();
  // Runs `action`, without the lock or with it; its exception gets the operation's name, and the next forward throws the text.
  template <class Action>
  void noting_failure(int64_t bucket, const std::string& name, Action&& action) {
    try {
      in_bucket(bucket, name, backward_.step(), std::forward<Action>(action));
    } catch (...) {
      std::string text = current_error_text();  // may take the GIL
      const Lock lock(mutex_);
      failure_.keep(std::move(text));
      throw;
    }
  }
  void note_times(Clock::time_point gradients_done, const std::vector<std::size_t>& missing);
  void wait_for_buckets(std::size_t first, std::size_t end);
  void follow_announcements();
  void send_late_buckets();
  void hand_out();
  void exchange_order();
  [[noreturn]] void throw_marked_twice(std::size_t parameter) const;

  std::recursive_mutex mutex_;  // a Python hook runs under it and may ask for stats()
  TrainableParameters parameters_;
  ReducerOptions options_;
  BucketPlan plan_;
  BucketStore store_;
  ArrivalTracker arrivals_{plan_};
  BackwardState backward_;
  ReducerGroup group_;
  UsedMap used_{parameters_, arrivals_, group_, options_.unused};
  BucketReducer bucket_reducer_{group_};
  ReductionPlan reduction_plan_;
  std::vector<int> chosen_;  // see choose; empty: nothing
  Residuals residuals_;
  double loss_scale_ = 1.0;
  bool watching_ = false;
  std::optional<bool> finite_;
  int64_t own_non_finite_ = -1;
  struct Flag {
    at::Tensor seen;  // int32 [1]
    c10::Stream made_on;
  };
  // Of this backward, on devices: not 0 where something was not finite. finite_ then speaks of the rest.
  std::unordered_map<c10::Device, Flag> flags_;

  bool joining_ = false;  // some ranks may have run out of input (torch's Join) and repeat all buckets
  FailureRecord failure_;
  bool optimizer_in_backward_ = false;

  c10::intrusive_ptr<c10d::Work> forward_work_;
  bool divide_by_all_ranks_ = true;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures_;

  GradientHooks hooks_{*this};
  ReducerStats stats_;
  Clock::time_point began_;
};

}  // namespace ringdp
