// GradientCompression: what codes have left out of the gradients (residuals), and how it gets back in. Where this rank
// owns the mean, a residual holds what the mean lacks; elsewhere it holds what this rank's gradient lacks
// (docs/reference/wire_format.md). What a backward leaves counts only if all of its gradients were finite. Owned by
// the Reducer, used under its lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "torch/reducer/bucket.h"
#include "torch/reducer/overflow_report.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/reduction.h"
#include "torch/reducer/reduction_assignment.h"
#include "torch/reducer/residuals.h"
#include "torch/reducer/trainable_parameters.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

class GradientCompression {
 public:
  using ByParameter = std::map<std::size_t, at::Tensor>;  // of the module

  GradientCompression(const TrainableParameters& parameters, ReductionAssignment& reductions, ReducerGroup& group)
      : parameters_(parameters), reductions_(reductions), group_(group) {}

  // Other reductions. Residuals of parameters whose reduction stays the same are kept. Returns the reductions before,
  // to be released without the lock.
  ReductionPlan set(ReductionPlan reductions);
  ReductionPlan clear();  // also all residuals

  bool keeps_residuals() const;  // of some parameter
  bool exchanges_codes() const { return reductions_.all().exchange_codes; }

  // ---- A backward.
  // torch's scaler sets it; ringdp's calls note_loss_scale instead.
  void set_loss_scale(double scale) { program_scale_ = scale; }
  void begin_backward();
  // The group may have other members (elastic jobs): residuals are what the new owners of the mean's parts need.
  // Between the operations of one view and those of the next.
  void follow_members();
  float loss_scale() const { return scale_; }  // a power of two: gradients are that much larger than residuals
  // Bucket.codes for `buffer`, which is the bucket's or takes its place; with residuals if the gradients are this
  // rank's.
  void list_sections(Bucket& bucket, const CodecReduction& reduction, const at::Tensor& buffer, bool with_residuals);
  // An exact bucket sends what earlier codes left out. When the step counts, no residual remains.
  void add_residuals(Bucket& bucket);
  // The backward has ended. The residuals that it wrote are the current ones from now on, if all of it was finite.
  // Those of parameters that no rank used stay.
  void commit(const UsedMap& used, const OverflowReport& overflow);

  // ---- Residuals, for the program. In units of this rank's gradient: float32 [numel], in the order of its memory.
  // `take` removes them; `give` overwrites them.
  ByParameter take_residuals(const std::vector<std::size_t>& param_indices);
  void give_residuals(const ByParameter& residuals);
  // As they are kept: float32 [numel] in the parameter's row-major order, on the CPU. Copies.
  ByParameter residuals() const;
  void set_residuals(const ByParameter& residuals);
  void clear_residuals() { residuals_.clear(); }

 private:
  const std::string& name_of(std::size_t param_index) const { return parameters_.all()[param_index].name; }
  void scale_owned_part(std::size_t param_index, const at::Tensor& residual, float factor) const;
  void scale_owned_part(const GroupView& members, std::size_t param_index, const at::Tensor& residual,
                        float factor) const;

  const TrainableParameters& parameters_;
  ReductionAssignment& reductions_;
  ReducerGroup& group_;
  Residuals residuals_;
  GroupView members_;  // to which they belong, where those may change
  double program_scale_ = 1.0;
  float scale_ = 1.0f;
};

}  // namespace ringdp
