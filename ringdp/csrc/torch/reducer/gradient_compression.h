// GradientCompression: the residuals of codes, and adding them to the next gradients. On the owner of a mean, a
// residual is what the mean lacks; on other ranks what the rank's gradient lacks (docs/reference/wire_format.md).
// Residuals of a backward count only if all of its gradients were finite. Owned by the Reducer, used under its lock.
//
// The loss scale of a backward: ringdp.amp notes it, the reducers that average the gradients read it. Stored by
// autograd's number of that backward, so losses with different scales do not mix; for the last few backwards only. Any
// thread that runs a part of the backward; no GIL needed.
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
#include "torch/reducer/reduction_assignment.h"
#include "torch/reducer/residuals.h"
#include "torch/reducer/trainable_parameters.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

// Called inside a backward, by the hook of the scaled loss. Does nothing outside of a backward.
void note_loss_scale(float scale);

// The scale of the backward in which this is called; 1 if its loss was not scaled.
float loss_scale_of_backward();

class GradientCompression {
 public:
  using ByParameter = std::map<std::size_t, at::Tensor>;  // of the module

  GradientCompression(const TrainableParameters& parameters, ReductionAssignment& reductions, ReducerGroup& group)
      : parameters_(parameters), reductions_(reductions), group_(group) {}

  // Replaces the reductions. Keeps residuals of parameters whose reduction does not change. Returns the old
  // reductions, to be released without the lock.
  ReductionPlan set(ReductionPlan reductions);
  ReductionPlan clear();  // also all residuals

  bool keeps_residuals() const;  // of some parameter
  bool exchanges_codes() const { return reductions_.all().exchange_codes; }

  // ---- A backward. Set by torch's scaler; ringdp's calls note_loss_scale instead.
  void set_loss_scale(double scale) { program_scale_ = scale; }
  void begin_backward();
  // The group may have new members (elastic jobs): converts residuals for the new owners of the mean's parts. Called
  // between the operations of one view and those of the next.
  void follow_members();
  float loss_scale() const { return scale_; }  // a power of two: gradients are that much larger than residuals
  // Bucket.codes for `buffer`, which is the bucket's or replaces it; with residuals if the gradients are this rank's.
  void list_sections(Bucket& bucket, const CodecReduction& reduction, const at::Tensor& buffer, bool with_residuals);
  // Adds residuals of earlier codes to an exact bucket. When the step counts, no residual remains.
  void add_residuals(Bucket& bucket);
  // The backward has ended. Its residuals become the current ones if all gradients were finite, except those of
  // parameters that no rank used.
  void commit(const UsedMap& used, const OverflowReport& overflow);

  // ---- Residuals, for the program, in units of this rank's gradient: float32 [numel], in the order of its memory.
  // `take` removes them; `give` overwrites them.
  ByParameter take_residuals(const std::vector<std::size_t>& param_indices);
  void give_residuals(const ByParameter& residuals);
  // In their own units: float32 [numel] in the parameter's row-major order, on the CPU. Copies.
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
  GroupView members_;  // the view of the residuals, in elastic jobs
  double program_scale_ = 1.0;
  float scale_ = 1.0f;
};

}  // namespace ringdp
