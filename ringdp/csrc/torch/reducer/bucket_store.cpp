#include "torch/reducer/bucket_store.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>
#include <utility>

#include "torch/reducer/messages.h"

namespace ringdp {
namespace {

// `copied`: .grad keeps memory of its own.
void write_sparse(Bucket& bucket, const at::Tensor& parameter, const std::string& name, bool copied) {
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined()) {
    bucket.buffer = at::sparse_coo_tensor(parameter.sizes(), parameter.options().layout(at::kSparse));
    return;
  }
  TORCH_CHECK(grad.is_sparse(), "Expected variable to have sparse gradient: ", name);
  bucket.buffer = copied ? grad.clone() : grad;
}

// Autograd would put it into .grad as it is, and does nothing else with it.
bool plain_gradient(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.layout() == at::kStrided && !gradient.unsafeGetTensorImpl()->is_python_dispatch() &&
         gradient.scalar_type() == parameter.scalar_type() && !c10::GradMode::is_enabled() &&
         torch::autograd::impl::post_acc_grad_hooks(parameter) == nullptr;
}

}  // namespace

void BucketStore::start() {
  drop();
  slots_.clear();
  for (const at::Tensor& parameter : parameters_.tensors()) slots_.emplace_back().parameter = parameter;
}

void BucketStore::set_dtype(std::size_t parameter, c10::ScalarType bucket) {
  slots_[parameter].dtype = slots_[parameter].parameter.scalar_type();
  slots_[parameter].bucket_dtype = bucket;
}

bool BucketStore::other_data() const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& parameter = slots_[i].parameter;
    if (parameter.scalar_type() != slots_[i].dtype ||
        static_cast<std::size_t>(parameter.numel()) != plan_.gradients()[i].numel)
      return true;
  }
  return false;
}

void BucketStore::release(std::size_t parameter) {
  const at::Tensor& grad = slots_[parameter].parameter.grad();
  if (grad.defined() && grad.is_same(slots_[parameter].view)) leave_bucket(slots_[parameter].view);
}

void BucketStore::allocate(bool marks) {
  std::vector<Bucket> buckets(plan_.buckets().size());
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    Bucket& bucket = buckets[index];
    bucket.index = index;
    bucket.members = plan_.buckets()[index];
    bucket.memory = plan_.memory(index);
    bucket.name = describe_bucket(index, bucket.members, parameters_.names());
    bucket.dtype = slots_[bucket.members.front()].bucket_dtype;
    bucket.carries_marks = marks && plan_.may_carry_marks(index);
    const PlannedGradient& first = plan_.gradients()[bucket.members.front()];
    bucket.sparse = first.sparse;
    bucket.direct = !bucket.sparse && !bucket.carries_marks && first.alone;
    for (std::size_t member : bucket.members) slots_[member].direct = bucket.direct;
  }
  buckets_ = std::move(buckets);
  for (std::size_t index = 0; index < plan_.kept(); ++index) give_memory(buckets_[index]);
}

void BucketStore::drop() {
  buckets_.clear();
  for (Slot& slot : slots_) slot.view.reset();
}

// A bucket of idle parameters gets its memory when one of them has a gradient after all.
void BucketStore::give_memory(Bucket& bucket) {
  if (bucket.sparse || bucket.direct || bucket.buffer.defined()) return;
  allocate_bucket(bucket, slots_[bucket.members.front()].parameter.device(),
                  bucket.carries_marks ? slots_.size() + 1 : 0);
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    Slot& slot = slots_[bucket.members[position]];
    slot.view = gradient_view(bucket, position, slot.parameter);
  }
}

at::Tensor BucketStore::zeros(std::size_t index, bool hooked) {
  Bucket& bucket = buckets_[index];
  give_memory(bucket);
  const at::Tensor& parameter = slots_[bucket.members.front()].parameter;
  if (bucket.sparse) return at::zeros_like(parameter);
  if (bucket.direct) return at::zeros({parameter.numel()}, parameter.options());
  return at::zeros_like(hooked ? bucket.gradients : bucket.buffer);
}

void BucketStore::begin_backward() {
  for (Slot& slot : slots_) slot.copy_back = slot.weighted = false;
}

at::Tensor BucketStore::take(std::size_t parameter, const at::Tensor& gradient) {
  Slot& slot = slots_[parameter];
  if (!gradient.defined()) return gradient;
  const double factor = factors_.incoming * (slot.weighted ? factors_.outgoing : 1);
  at::Tensor& grad = slot.parameter.mutable_grad();
  const bool has_place = (slot.view.defined() || slot.direct) && !slot.cast() && !owns_gradient(parameter);
  if (!has_place || grad.defined() || !slot.parameter.requires_grad() || !plain_gradient(gradient, slot.parameter))
    return gradient_times(gradient, factor);
  if (slot.direct) {
    // As autograd would, but without the reference it keeps for the hooks that follow.
    if (factor != 1 || held_elsewhere(gradient) ||
        !torch::autograd::utils::obeys_layout_contract(gradient, slot.parameter))
      return gradient_times(gradient, factor);
    grad = gradient.detach();
    return {};
  }
  if (held_elsewhere(slot.view)) renew_view(parameter);
  copy_gradient_times(slot.view, gradient, factors_.incoming * factors_.outgoing);
  slot.weighted = true;
  grad = slot.view;
  return {};
}

// Nothing is copied where .grad already is the part of the bucket.
void BucketStore::write(std::size_t parameter) {
  Slot& slot = slots_[parameter];
  Bucket& bucket = buckets_[plan_.bucket_of(parameter)];
  if (bucket.sparse) {
    write_sparse(bucket, slot.parameter, parameters_.names()[parameter], owns_gradient(parameter));
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    bucket.buffer = gradient_times(bucket.buffer, factors_.outgoing);
    return;
  }
  at::Tensor& grad = slot.parameter.mutable_grad();
  give_memory(bucket);
  if (bucket.direct) {
    write_direct(parameter, bucket);
  } else if (!grad.defined()) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (held_elsewhere(slot.view)) renew_view(parameter);
    slot.view.zero_();
  } else if (grad.unsafeGetTensorImpl() != slot.view.unsafeGetTensorImpl() || owns_gradient(parameter)) {
    adopt(parameter, grad);
  }
  if (bucket.direct || factors_.when_sent)
    bucket.factors = factors_.of_ranks;  // of a direct one the all-reduce can do it
  else if (!slot.weighted)
    multiply_gradient(slot.view, factors_.outgoing);
  slot.weighted = true;
  remember_stream(bucket);
}

void BucketStore::write_direct(std::size_t parameter, Bucket& bucket) {
  Slot& slot = slots_[parameter];
  at::Tensor& grad = slot.parameter.mutable_grad();
  const bool in_place = !hooks_.shared(parameter);
  bucket.buffer = bucket.gradients = in_place ? as_buffer(grad, slot.parameter) : at::Tensor();
  if (bucket.buffer.defined()) return;
  allocate_bucket(bucket, slot.parameter.device(), 0);
  slot.view = gradient_view(bucket, 0, slot.parameter);
  if (grad.defined()) adopt(parameter, grad);
}

void BucketStore::adopt(std::size_t parameter, at::Tensor& gradient) {
  Slot& slot = slots_[parameter];
  if (held_elsewhere(slot.view)) renew_view(parameter);
  copy_gradient(slot.view, gradient);
  if (gradient.requires_grad() || slot.cast() || owns_gradient(parameter)) {
    slot.copy_back = true;  // create_graph: what comes later differentiates through it
  } else {
    gradient = slot.view;
  }
}

// The program has kept the last .grad: that tensor keeps its memory and its values, and the bucket gets a new view.
void BucketStore::renew_view(std::size_t parameter) {
  Slot& slot = slots_[parameter];
  at::Tensor kept = slot.view;
  const Bucket& bucket = buckets_[plan_.bucket_of(parameter)];
  const auto position = std::find(bucket.members.begin(), bucket.members.end(), parameter) - bucket.members.begin();
  slot.view = gradient_view(bucket, static_cast<std::size_t>(position), slot.parameter);
  leave_bucket(kept);
}

void BucketStore::hand_out(std::size_t parameter, bool keep_none) {
  Slot& slot = slots_[parameter];
  const Bucket& bucket = buckets_[plan_.bucket_of(parameter)];
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (bucket.sparse) {
    grad = bucket.buffer;
  } else if (slot.copy_back) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (grad.defined()) grad.copy_(slot.view);  // a hook may have applied it and let it go
  } else if (!keep_none) {
    if (slot.cast() || (owns_gradient(parameter) && !slot.direct)) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      grad = slot.view.to(slot.dtype, /*non_blocking=*/false, /*copy=*/true);
    } else {
      grad = slot.view;
    }
  }
}

void BucketStore::end_backward() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (Bucket& bucket : buckets_) {
    if (!bucket.direct) continue;
    bucket.buffer.reset();
    bucket.gradients.reset();
    slots_[bucket.members.front()].view.reset();
  }
}

void BucketStore::zero_gradients() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto is_view = [&](std::size_t i) {
    const at::Tensor& grad = slots_[i].parameter.grad();
    return grad.defined() && grad.is_same(slots_[i].view);
  };
  std::vector<bool> done(slots_.size(), false);
  for (Bucket& bucket : buckets_) {
    if (bucket.sparse || !std::all_of(bucket.members.begin(), bucket.members.end(), is_view)) continue;
    bucket.gradients.zero_();
    for (std::size_t member : bucket.members) done[member] = true;
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    at::Tensor& grad = slots_[i].parameter.mutable_grad();
    if (!done[i] && grad.defined()) {
      if (grad.requires_grad()) grad = grad.detach();
      grad.zero_();
    }
  }
}

}  // namespace ringdp
