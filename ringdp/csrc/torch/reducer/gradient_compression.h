// GradientCompression: which parameters are not reduced exactly, and what codes have left out of their gradients (residuals).
// Where this rank owns the mean, a residual holds what the mean lacks; elsewhere it holds what this rank's gradient lacks
// (docs/reference/wire_format.md). What a backward leaves counts only if all of its gradients were finite.
// Buckets of an AutoReduction are exact until `choose` gives them another reduction, while the plan stays.
// Owned by the Reducer, used under its lock; but ask_hooks and commit_hooks, which run Python code without it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/bucket_store.h"
#include "torch/reducer/overflow_report.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/reduction.h"
#include "torch/reducer/residuals.h"
#include "torch/reducer/trainable_parameters.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

// The reductions of parameters that are not reduced exactly; the vectors are indexed by parameter of the module.
struct ReductionPlan {
  std::vector<std::shared_ptr<Reduction>> reductions;
  std::vector<int> reduction_of;        // -1: exact
  std::vector<uint32_t> owner_offsets;  // which rank owns which part of a parameter: CompressedSection::owner_offset
  bool exchange_codes = false;          // codes go over c10d (c10d_compressed_all_reduce.h); the same on all ranks
};

class GradientCompression {
 public:
  using ByParameter = std::map<std::size_t, at::Tensor>;  // of the module

  GradientCompression(const TrainableParameters& parameters, const BucketPlan& plan, ReducerGroup& group)
      : parameters_(parameters), plan_(plan), group_(group) {}

  // ---- Which reduction.
  // Throws Error(kValue) for a plan that does not fit the parameters, or codecs that cannot be used where they are.
  void check(const ReductionPlan& plan) const;
  const ReductionPlan& reductions() const { return reductions_; }
  // Residuals of parameters whose reduction stays the same are kept. Returns the plan before, to be released without the lock.
  ReductionPlan set(ReductionPlan plan);
  ReductionPlan clear();  // also all residuals
  bool none() const { return reductions_.reductions.empty(); }
  bool exchanges_codes() const { return reductions_.exchange_codes; }
  // Null: exact. So are sparse, integer and complex gradients, always.
  Reduction* reduction_of(std::size_t param_index) const;
  int reduction_number(std::size_t param_index) const { return reductions_.reduction_of[param_index]; }
  // By bucket of the plan: one of the reductions in place of AutoReduction, or -1; until the next plan of buckets.
  void choose(const std::vector<int>& reduction_of_bucket);
  void forget_choice() { chosen_.clear(); }
  bool free(std::size_t bucket) const;             // `choose` may give it another
  int number_of_bucket(std::size_t bucket) const;  // -1: exact
  Reduction* of_bucket(std::size_t bucket) const;  // an AutoReduction where nothing was chosen

  // ---- A backward.
  // torch's scaler sets it; ringdp's calls note_loss_scale instead.
  void set_loss_scale(double scale) { program_scale_ = scale; }
  void begin_backward();
  float loss_scale() const { return scale_; }  // a power of two: gradients are that much larger than residuals
  // Bucket.codes for `buffer`, which is the bucket's or takes its place; with residuals if the gradients are this rank's.
  void list_sections(Bucket& bucket, const CodecReduction& reduction, const at::Tensor& buffer, bool with_residuals);
  // An exact bucket sends what earlier codes left out. When the step counts, no residual remains.
  void add_residuals(Bucket& bucket);
  // The residuals written in `step` are the current ones from now on. Those of parameters that no rank used stay.
  void commit(const BucketStore& buckets, int64_t step, const UsedMap& used, const OverflowReport& overflow);

  // ---- Reductions that are hooks.
  // Whether they may still issue operations after the last bucket was launched.
  bool calls_back() const;
  void set_divisor(int64_t divisor) const;
  HookVerdicts used_hooks(const BucketStore& buckets, int64_t step) const;
  static void ask_hooks(HookVerdicts& hooks);
  using UnusedOf = std::map<HookReduction*, std::vector<std::string>>;
  UnusedOf unused_of_hooks(const UsedMap& used) const;
  static void commit_hooks(const HookVerdicts& hooks, bool finite, const UnusedOf& unused);

  // ---- Residuals, for the program. In units of this rank's gradient: float32 [numel], in the order of its memory. `take`
  // removes them; `give` overwrites them.
  ByParameter take_residuals(const std::vector<std::size_t>& param_indices);
  void give_residuals(const ByParameter& residuals);
  // As they are kept: float32 [numel] in the parameter's row-major order, on the CPU. Copies.
  ByParameter residuals() const;
  void set_residuals(const ByParameter& residuals);
  void clear_residuals() { residuals_.clear(); }

 private:
  void scale_owned_part(std::size_t param_index, const at::Tensor& residual, float factor) const;

  const TrainableParameters& parameters_;
  const BucketPlan& plan_;
  ReducerGroup& group_;
  ReductionPlan reductions_;
  std::vector<int> chosen_;  // see choose; empty: nothing
  Residuals residuals_;
  double program_scale_ = 1.0;
  float scale_ = 1.0f;
};

}  // namespace ringdp
