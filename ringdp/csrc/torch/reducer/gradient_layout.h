// GradientLayout: the parts of a reducer that are constant during a step: the parameters, their hooks, the plan of
// their buckets, the buckets' memory, compression, and the group. Between two steps parameters may be frozen or
// replaced, and reductions, hooks or the group replaced; the layout then updates its parts together. Owned by the
// Reducer, used under its lock, except the hooks, which autograd calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/bucket_reducer.h"
#include "torch/reducer/bucket_store.h"
#include "torch/reducer/gradient_compression.h"
#include "torch/reducer/gradient_hooks.h"
#include "torch/reducer/gradient_pool.h"
#include "torch/reducer/gradient_weights.h"
#include "torch/reducer/left_over_gradients.h"
#include "torch/reducer/overflow_report.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/step_repair.h"
#include "torch/reducer/trainable_parameters.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

struct ReducerOptions {
  std::vector<std::size_t> caps_bytes;  // see assign_buckets
  UnusedParameters unused = UnusedParameters::kFinish;
  bool average = false;            // see ReducerGroup
  bool graph_shows_unused = true;  // false if parameters are not leaves of the graph: _autograd_hook reports them
  bool own_gradients = false;      // .grad is never a part of a bucket: copied in, and the mean copied back
  bool skip_unused = false;        // does not send buckets for which no rank has gradients
  bool host_control = false;       // see ReducerGroup
  bool gradient_pool = false;      // see GradientPool
  bool names_compared = false;     // see ReducerGroup
  bool weighted = false;           // see GradientWeights
  std::size_t report_every = 0;    // see StepReport
  bool alone = false;              // a single rank also reduces its buckets: for tests and benchmarks
  std::optional<c10::ScalarType> reduce_dtype;  // of the exact buckets; other gradients are cast to it and back
};

class GradientLayout {
 public:
  // `parameters`: all of the module's, also those that do not require grad now.
  GradientLayout(std::vector<ModuleParameter> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options, GradientListener& listener);

  const ReducerOptions options;
  const GradientPool pool;
  TrainableParameters parameters;
  ReducerGroup group;
  BucketPlan plan;
  GradientHooks hooks;
  GradientWeights weights;
  BucketStore store;
  LeftOverGradients left_over;
  ReductionAssignment reductions;
  GradientCompression compression;
  OverflowReport overflow;
  BucketReducer buckets;
  StepRepair repair;

  // With one rank: nothing is sent, and gradients stay in autograd's memory.
  bool local() const { return group.ranks() == 1 && !options.alone && !buckets.has_hook() && !repair.on(); }
  // Hooks are attached, and there are parameters.
  bool watched() const { return hooks.attached() && parameters.size() > 0; }
  // Buckets get their memory at the first forward that needs it, not at construction: a hook may still be registered,
  // and evaluation needs none.
  void allocate();
  // Throws the failure of ring's group if another backend reduces the buckets.
  void throw_if_group_failed();
  // Whether hooks may issue operations after the last bucket was launched.
  bool calls_back() const { return buckets.has_hook() || reductions.calls_back(); }
  // Whether the map of used parameters is an operation of its own.
  bool sends_used_map() const;
  // Whether some buckets may not be sent, now or once the order of the gradients is learned.
  bool may_skip() const;

  // Plans with the order of rank 0; once, after the first backward: true.
  bool follow_learned_order();
  // The order of arrival, which rank 0 sends to all, for the next plan, so that buckets fill up one after the other.
  std::vector<int32_t> exchange_order(const std::vector<std::size_t>& arrivals,
                                      const std::vector<bool>& used_somewhere);
  // True if parameters were frozen or unfrozen since the last layout, or got other data. Throws on all ranks if they
  // do not agree about that.
  bool follow_requires_grad();
  // Replaces the parameters. Drops reductions and residuals, which are of the old ones; the returned old plan is to be
  // released without the lock.
  ReductionPlan replace_parameters(std::vector<ModuleParameter> others);
  void check_reductions(const ReductionPlan& reductions) const;
  ReductionPlan set_reductions(ReductionPlan reductions);
  void choose(const std::vector<int>& reduction_of_bucket);
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void set_group(c10::intrusive_ptr<c10d::ProcessGroup> other, bool average, bool names_compared);

 private:
  void start();
  void lay_out_again();
  std::vector<PlannedGradient> describe_gradients();
  c10::ScalarType gradient_dtype_of(std::size_t parameter) const;
  c10::ScalarType bucket_dtype(std::size_t parameter) const;
  void attach_hooks();
  void assign_reductions();
};

}  // namespace ringdp
