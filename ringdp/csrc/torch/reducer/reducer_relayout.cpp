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
  if (!changed && !store_.other_data())
    return;  // all ranks change a module's data in the same place, as they do the forward
  const std::vector<std::size_t> frozen = parameters_.frozen();
  try {
    if (changed && group_.ranks() > 1) {
      average_left_over(parameters_.agree_about_change(group_, store_.left_over()));
    }
  } catch (...) {
    failure_.keep(current_error_text());
    throw;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (std::binary_search(frozen.begin(), frozen.end(), parameters_.param_index(i))) store_.release(i);
  }
  parameters_.accept();
  start();
}

void Reducer::replace_parameters(std::vector<ModuleParameter> parameters) {
  ReductionPlan before;  // goes when the lock is free: Python is told
  const Lock lock(mutex_);
  failure_.throw_if_failed(backward_.step());
  throw_if_unfinished(/*notify=*/false);
  std::unordered_set<const c10::TensorImpl*> staying;
  for (const ModuleParameter& one : parameters) staying.insert(one.tensor.unsafeGetTensorImpl());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!staying.contains(parameters_.tensors()[i].unsafeGetTensorImpl())) store_.release(i);
  }
  parameters_ = TrainableParameters(std::move(parameters));
  before = std::exchange(reduction_plan_, {});
  residuals_.clear();
  bucket_reducer_.set_watching(looks_for_non_finite());
  used_.warn_again();
  start();
}

// Gradients accumulated under no_sync are still to be averaged once; the optimizer may apply them.
void Reducer::average_left_over(const std::vector<std::size_t>& param_indices) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!std::binary_search(param_indices.begin(), param_indices.end(), parameters_.param_index(i))) continue;
    store_.average_left_over(i, [&](const at::Tensor& buffer) {
      const NamedScope scope("last gradient of " + parameters_.names()[i]);
      bucket_reducer_.average(buffer);
    });
  }
}

}  // namespace ringdp
