#include "torch/reducer/left_over_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "torch/reducer/bucket.h"

namespace ringdp {

void LeftOverGradients::start() {
  std::unordered_map<const c10::TensorImpl*, const Slot*> left_over;
  for (const Slot& slot : slots_) {
    if (slot.left_over) left_over.emplace(slot.parameter.unsafeGetTensorImpl(), &slot);
  }
  std::vector<Slot> slots;
  for (const at::Tensor& parameter : parameters_.tensors()) {
    const auto found = left_over.find(parameter.unsafeGetTensorImpl());
    slots.push_back(found == left_over.end() ? Slot{parameter} : *found->second);
  }
  slots_ = std::move(slots);
  count_again();
}

void LeftOverGradients::count_again() {
  count_ = static_cast<std::size_t>(
      std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.left_over; }));
}

void LeftOverGradients::note(std::size_t parameter, bool under_no_sync) {
  Slot& slot = slots_[parameter];
  if (!std::exchange(slot.left_over, true)) ++count_;
  slot.under_no_sync = under_no_sync;
  const at::Tensor& grad = slot.parameter.grad();
  slot.grad = grad.unsafeGetTensorImpl();
  slot.version = grad.defined() ? grad._version() : 0;
}

void LeftOverGradients::averaged(std::size_t parameter) {
  if (std::exchange(slots_[parameter].left_over, false)) --count_;
}

std::vector<LeftOverGradients::Parameter> LeftOverGradients::list() const {
  std::vector<Parameter> result;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const at::Tensor& grad = slot.parameter.grad();
    if (!slot.left_over || !grad.defined()) continue;
    const bool changed = grad.unsafeGetTensorImpl() != slot.grad || grad._version() != slot.version;
    result.push_back({parameters_.param_index(i), slot.under_no_sync, changed, plan_.gradients()[i].bytes()});
  }
  return result;
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
  count_ = 0;
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
  averaged(parameter);
}

}  // namespace ringdp
