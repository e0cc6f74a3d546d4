#include "torch/reducer/bucket_store.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "torch/reducer/messages.h"

namespace ringdp {

using torch::autograd::get_current_graph_task_id;

namespace {

// `copied`: .grad keeps memory of its own.
void write_sparse(Bucket& bucket, const at::Tensor& parameter, const std::string& name, bool copied) {
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined()) {
    bucket.buffer =
        at::sparse_coo_tensor(parameter.sizes(), parameter.options().dtype(bucket.dtype).layout(at::kSparse));
    return;
  }
  TORCH_CHECK(grad.is_sparse(), "Expected variable to have sparse gradient: ", name);
  bucket.buffer = copied ? grad.clone() : grad;
}

[[noreturn]] void throw_other_dtype(const std::string& name, c10::ScalarType found, c10::ScalarType planned) {
  ErrorContext context;
  context.name = name;
  context.advice = "set grad_dtype and the parameter's type between two steps, before the forward, on all ranks alike";
  throw Error(ErrorKind::kState,
              "the gradient of " + name + " is of type " + c10::toString(found) + ", and its bucket was made for " +
                  c10::toString(planned) + ": " + context.advice,
              context);
}

// Whether autograd would store this tensor in .grad without a copy, and not use it otherwise.
bool plain_gradient(const at::Tensor& gradient, const at::Tensor& parameter, c10::ScalarType dtype) {
  return gradient.layout() == at::kStrided && !gradient.unsafeGetTensorImpl()->is_python_dispatch() &&
         gradient.scalar_type() == dtype && !c10::GradMode::is_enabled() &&
         torch::autograd::impl::post_acc_grad_hooks(parameter) == nullptr;
}

bool on_memory_of(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() && tensor.storage().is_alias_of(other.storage());
}

bool same_elements(const at::Tensor& a, const at::Tensor& b) {
  return on_memory_of(a, b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

}  // namespace

void BucketStore::start() {
  drop();
  slots_.clear();
  for (const at::Tensor& parameter : parameters_.tensors()) slots_.emplace_back().parameter = parameter;
}

void BucketStore::set_dtype(std::size_t parameter, c10::ScalarType gradient, c10::ScalarType bucket) {
  Slot& slot = slots_[parameter];
  slot.dtype = slot.parameter.scalar_type();
  slot.gradient_dtype = gradient;
  slot.bucket_dtype = bucket;
}

bool BucketStore::other_data() const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& parameter = slots_[i].parameter;
    if (parameter.scalar_type() != slots_[i].dtype || gradient_dtype(parameter) != slots_[i].gradient_dtype ||
        static_cast<std::size_t>(parameter.numel()) != plan_.gradients()[i].numel)
      return true;
  }
  return false;
}

void BucketStore::release(std::size_t parameter) {
  const at::Tensor& grad = slots_[parameter].parameter.grad();
  if (!grad.defined() || !grad.is_same(slots_[parameter].view)) return;
  const Bucket& bucket = buckets_[plan_.bucket_of(parameter)];
  if (!memory_held_elsewhere(bucket.buffer, own_tensors(bucket))) leave_bucket(slots_[parameter].view);
}

// Tensors on the memory of the bucket.
std::size_t BucketStore::own_tensors(const Bucket& bucket) const {
  std::size_t count = 1;
  if (bucket.marks.defined()) count += 2;  // and bucket.gradients, which otherwise is the buffer itself
  for (const std::size_t member : bucket.members) {
    const Slot& slot = slots_[member];
    const at::Tensor& grad = slot.parameter.grad();
    if (on_memory_of(slot.view, bucket.buffer)) ++count;
    if (on_memory_of(grad, bucket.buffer) && !grad.is_same(slot.view)) ++count;
  }
  return count;
}

bool BucketStore::address_known(const Bucket& bucket) const {
  const auto stayed = [&](std::size_t member) { return slots_[member].handed_out && !slots_[member].copy_back; };
  return std::any_of(bucket.members.begin(), bucket.members.end(), stayed) ||
         memory_held_elsewhere(bucket.buffer, own_tensors(bucket));
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
  move_gradients();
}

// A .grad of an old bucket moves into its new bucket, if the program has no other tensor on its memory.
void BucketStore::move_gradients() {
  if (own_gradients_ || get_current_graph_task_id() != -1) return;
  std::unordered_map<const c10::StorageImpl*, std::size_t> gradients_on;
  const auto memory_of = [](const at::Tensor& gradient) { return gradient.storage().unsafeGetStorageImpl(); };
  const auto movable = [&](const Slot& slot) {
    const at::Tensor& grad = slot.parameter.grad();
    return slot.view.defined() && on_memory_of(grad, grad);
  };
  for (const Slot& slot : slots_)
    if (movable(slot)) ++gradients_on[memory_of(slot.parameter.grad())];
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!movable(slot) || slot.cast() || hooks_.shared(i)) continue;
    at::Tensor& grad = slot.parameter.mutable_grad();
    std::size_t& gradients = gradients_on[memory_of(grad)];
    if (grad.requires_grad() || held_elsewhere(grad) || memory_held_elsewhere(grad, gradients)) continue;
    --gradients;
    copy_gradient(slot.view, grad);
    grad = slot.view;
  }
}

void BucketStore::drop() {
  buckets_.clear();
  for (Slot& slot : slots_) slot.view.reset();
}

// A bucket of idle parameters gets its memory when one of them has a gradient.
void BucketStore::give_memory(Bucket& bucket) {
  if (bucket.sparse || bucket.direct || bucket.buffer.defined()) return;
  renew_memory(bucket);
}

void BucketStore::renew_memory(Bucket& bucket) {
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
  if (bucket.sparse) return at::zeros_like(parameter, parameter.options().dtype(bucket.dtype));
  if (bucket.direct) return at::zeros({parameter.numel()}, parameter.options().dtype(bucket.dtype));
  return at::zeros_like(hooked ? bucket.gradients : bucket.buffer);
}

void BucketStore::begin_backward() {
  const int task = get_current_graph_task_id();
  for (Slot& slot : slots_) {
    const bool none = !slot.parameter.grad().defined();
    slot.fresh = none || (slot.new_in == task && task != -1);
    if (none) slot.handed_out = false;
    slot.copy_back = slot.weighted = false;
  }
  leave_kept_memory();
}

void BucketStore::leave_kept_memory() {
  for (Bucket& bucket : buckets_)
    if (kept_from_before(bucket)) renew_memory(bucket);
}

// Whether the program has replaced a .grad that was a part of the bucket, and still has that tensor, or others on its
// memory.
bool BucketStore::kept_from_before(const Bucket& bucket) const {
  if (own_gradients_ || bucket.sparse || bucket.direct || !bucket.buffer.defined()) return false;
  const auto let_go = [&](std::size_t member) { return !slots_[member].parameter.grad().is_same(slots_[member].view); };
  const auto kept = [&](std::size_t member) { return let_go(member) && held_elsewhere(slots_[member].view); };
  if (std::any_of(bucket.members.begin(), bucket.members.end(), kept)) return true;
  const std::size_t least = 1 + (bucket.marks.defined() ? 2 : 0) + bucket.members.size();
  return bucket.buffer.storage().use_count() > least &&
         std::any_of(bucket.members.begin(), bucket.members.end(), let_go) &&
         other_tensors_on_memory(bucket.buffer, own_tensors(bucket));
}

at::Tensor BucketStore::take(std::size_t parameter, const at::Tensor& gradient) {
  Slot& slot = slots_[parameter];
  if (!gradient.defined()) return gradient;
  const double factor = factors_.incoming * (slot.weighted ? factors_.outgoing : 1);
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (!grad.defined()) {
    slot.new_in = get_current_graph_task_id();
    slot.handed_out = false;
  }
  const bool has_place = (slot.view.defined() || slot.direct) && !slot.cast() && !owns_gradient(parameter);
  if (!has_place || grad.defined() || !slot.parameter.requires_grad() ||
      !plain_gradient(gradient, slot.parameter, slot.gradient_dtype))
    return gradient_times(gradient, factor);
  if (slot.direct) {
    // Accumulates like autograd, but without its extra reference for later hooks.
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

// No copy if .grad already is the part of the bucket.
void BucketStore::write(std::size_t parameter) {
  Slot& slot = slots_[parameter];
  Bucket& bucket = buckets_[plan_.bucket_of(parameter)];
  if (bucket.sparse) {
    write_sparse(bucket, slot.parameter, parameters_.names()[parameter], owns_gradient(parameter));
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (factors_.when_sent)
      bucket.factors = factors_.of_ranks;
    else
      bucket.buffer = gradient_times(bucket.buffer, factors_.outgoing);
    return;
  }
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (grad.defined() && grad.scalar_type() != slot.gradient_dtype)
    throw_other_dtype(parameters_.names()[parameter], grad.scalar_type(), slot.gradient_dtype);
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
    bucket.factors = factors_.of_ranks;  // in a direct bucket the all-reduce can multiply
  else if (!slot.weighted)
    multiply_gradient(slot.view, factors_.outgoing);
  slot.weighted = true;
  remember_stream(bucket);
}

void BucketStore::write_direct(std::size_t parameter, Bucket& bucket) {
  Slot& slot = slots_[parameter];
  at::Tensor& grad = slot.parameter.mutable_grad();
  // A gradient that autograd has just made may share memory that the rest of the backward still reads.
  const bool in_place = grad.defined() && !hooks_.shared(parameter) && !(slot.fresh && memory_held_elsewhere(grad));
  bucket.buffer = bucket.gradients = in_place ? as_buffer(grad, slot.parameter, slot.gradient_dtype) : at::Tensor();
  if (bucket.buffer.defined()) return;
  allocate_bucket(bucket, slot.parameter.device(), 0);
  slot.view = gradient_view(bucket, 0, slot.parameter);
  if (grad.defined()) adopt(parameter, grad);
}

void BucketStore::adopt(std::size_t parameter, at::Tensor& gradient) {
  Slot& slot = slots_[parameter];
  // create_graph: later computation differentiates through it.
  const bool stays = gradient.requires_grad() || slot.cast() || owns_gradient(parameter);
  if (!stays && same_elements(gradient, slot.view)) {
    gradient = slot.view;
    return;
  }
  if (held_elsewhere(slot.view)) renew_view(parameter);
  copy_gradient(slot.view, gradient);
  slot.copy_back = stays || kept(slot);
  if (!slot.copy_back) gradient = slot.view;
}

// Before the mean, a new gradient is visible to the program only in hooks of the parameter.
bool BucketStore::kept(const Slot& slot) const {
  if (slot.fresh && torch::autograd::impl::post_acc_grad_hooks(slot.parameter) == nullptr) return false;
  const at::Tensor& grad = slot.parameter.grad();
  return held_elsewhere(grad) || memory_held_elsewhere(grad);
}

// In place, so that other tensors on that memory change too; not if the rest of the backward may still read it.
void BucketStore::multiply(std::size_t parameter) {
  Slot& slot = slots_[parameter];
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (!grad.defined() || factors_.outgoing == 1) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (grad.requires_grad() || (slot.fresh && memory_held_elsewhere(grad))) {
    grad = gradient_times(grad, factors_.outgoing);
  } else {
    multiply_gradient(grad, factors_.outgoing);
  }
}

// The program has kept the last .grad: that tensor keeps its memory and values, and the bucket gets a new view.
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
  slot.handed_out = true;
  if (bucket.sparse) {
    grad = bucket.buffer;
  } else if (slot.copy_back) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (grad.defined()) grad.copy_(slot.view);  // a hook may have applied it and set it to None
  } else if (!keep_none) {
    if (slot.cast() || (owns_gradient(parameter) && !slot.direct)) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      grad = slot.view.to(slot.gradient_dtype, /*non_blocking=*/false, /*copy=*/true);
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
