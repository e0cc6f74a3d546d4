#include "torch/reducer/left_over_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "torch/reducer/bucket.h"

namespace ringdp {

void LeftOverGradients::start() {
  std::unordered_set<const c10::TensorImpl*> left_over;
  for (const Slot& slot : slots_) {
    if (slot.left_over) left_over.insert(slot.parameter.unsafeGetTensorImpl());
  }
  std::vector<Slot> slots;
  for (const at::Tensor& parameter : parameters_.tensors())
    slots.push_back({parameter, left_over.contains(parameter.unsafeGetTensorImpl())});
  slots_ = std::move(slots);
}

std::vector<bool> LeftOverGradients::by_param_index() const {
  std::vector<bool> result(parameters_.all().size(), false);
  for (std::size_t i = 0; i < slots_.size(); ++i)
    result[parameters_.param_index(i)] = slots_[i].left_over && slots_[i].parameter.grad().defined();
  return result;
}

bool LeftOverGradients::none() const {
  return std::none_of(slots_.begin(), slots_.end(),
                      [](const Slot& slot) { return slot.left_over && slot.parameter.grad().defined(); });
}

void LeftOverGradients::forget() {
  for (Slot& slot : slots_) slot.left_over = false;
}

Bucket LeftOverGradients::flat(std::size_t parameter, c10::ScalarType dtype, double factor) const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor& tensor = slots_[parameter].parameter;
  Bucket bucket;
  bucket.memory = lay_out_bucket(plan_.gradients(), std::vector<std::size_t>{parameter});
  bucket.dtype = dtype;
  allocate_bucket(bucket, tensor.device(), 0);
  if (tensor.grad().defined()) copy_gradient_times(gradient_view(bucket, 0, tensor), tensor.grad(), factor);
  return bucket;
}

void LeftOverGradients::accept(std::size_t parameter, const Bucket& bucket) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Slot& slot = slots_[parameter];
  const at::Tensor mean = gradient_view(bucket, 0, slot.parameter);
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (parameters_[parameter].sparse) {
    grad = mean.to_sparse(1);
  } else if (grad.defined()) {
    grad.copy_(mean);
  } else {
    grad = mean.to(gradient_dtype(slot.parameter).value_or(slot.parameter.scalar_type()));
  }
  slot.left_over = false;
}

}  // namespace ringdp
