// Parameters that were frozen, unfrozen or replaced since the last layout: hooks and buckets are made anew.
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/reducer/reducer.h"
#include "torch/reducer/reducer_errors.h"

namespace ringdp {

void Reducer::follow_requires_grad() {
  const bool changed = parameters_.changed();
  // module.double() and the like give parameters other data, which hooks and buckets no longer fit. All ranks do that in
  // the same place, as they do the forward, and their modules were alike.
  bool other_data = false;
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    const at::Tensor& parameter = gradient_states_[i].parameter;
    other_data |= parameter.scalar_type() != gradient_states_[i].dtype ||
                  static_cast<std::size_t>(parameter.numel()) != plan_.gradients()[i].numel;
  }
  if (!changed && !other_data) return;
  const std::vector<std::size_t> frozen = parameters_.frozen();
  try {
    if (changed && group_.ranks() > 1) {
      std::vector<bool> left_over(parameters_.all().size(), false);
      for (const GradientState& gradient_state : gradient_states_)
        left_over[gradient_state.param_index] = gradient_state.local && gradient_state.parameter.grad().defined();
      average_left_over(parameters_.agree_about_change(group_, left_over));
    }
  } catch (...) {
    failure_.keep(current_error_text());
    throw;
  }
  std::vector<std::size_t> leaving;
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    if (std::binary_search(frozen.begin(), frozen.end(), gradient_states_[i].param_index)) leaving.push_back(i);
  }
  release_gradients(leaving);
  parameters_.accept();
  start_over();
}

void Reducer::replace_parameters(std::vector<ModuleParameter> parameters) {
  ReductionPlan before;  // goes when the lock is free: Python is told
  const Lock lock(mutex_);
  failure_.throw_if_failed(backward_.step());
  throw_if_unfinished(/*notify=*/false);
  std::unordered_set<const c10::TensorImpl*> staying;
  for (const ModuleParameter& one : parameters) staying.insert(one.tensor.unsafeGetTensorImpl());
  std::vector<std::size_t> leaving;
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    if (!staying.contains(gradient_states_[i].parameter.unsafeGetTensorImpl())) leaving.push_back(i);
  }
  release_gradients(leaving);
  parameters_ = TrainableParameters(std::move(parameters));
  before = std::exchange(reduction_plan_, {});
  residuals_.clear();
  bucket_reducer_.set_watching(looks_for_non_finite());
  warned_ = false;
  start_over();
}

// The .grad of these parameters gets memory of its own: a parameter that is reduced no longer would keep its bucket's.
void Reducer::release_gradients(const std::vector<std::size_t>& leaving) {
  for (const std::size_t i : leaving) {
    const at::Tensor& grad = gradient_states_[i].parameter.grad();
    if (grad.defined() && grad.is_same(gradient_states_[i].view)) leave_bucket(gradient_states_[i].view);
  }
}

// With the parameters that the module has now and require grad.
void Reducer::start_over() {
  hooks_.reset();
  take_trainable();
  drop_memory();
  plan_.start(describe_gradients());
  planned_anew();
  set_hooks();
}

// Gradients accumulated under no_sync are still to be averaged once; the optimizer may apply them.
void Reducer::average_left_over(const std::vector<std::size_t>& indices) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    GradientState& gradient_state = gradient_states_[i];
    if (!std::binary_search(indices.begin(), indices.end(), gradient_state.param_index)) continue;
    Bucket bucket;
    bucket.memory = lay_out_bucket(plan_.gradients(), std::vector<std::size_t>{i});
    bucket.dtype = bucket_dtype(gradient_state.param_index);
    allocate_bucket(bucket, gradient_state.parameter.device(), 0);
    const at::Tensor mean = gradient_view(bucket, 0, gradient_state.parameter);
    at::Tensor& grad = gradient_state.parameter.mutable_grad();
    if (grad.defined()) copy_gradient(mean, grad);
    {
      const NamedScope scope("last gradient of " + parameters_.names()[i]);
      bucket_reducer_.average(bucket.buffer);
    }
    if (gradient_state.sparse) {
      grad = mean.to_sparse(1);
    } else if (grad.defined()) {
      grad.copy_(mean);
    } else {
      grad = mean.to(gradient_state.dtype);
    }
    gradient_state.local = false;
  }
}

}  // namespace ringdp
