#include "torch/reducer/buckets.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <chrono>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/backend/future_wait.h"
#include "torch/backend/process_group.h"
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

namespace {

constexpr std::chrono::milliseconds kHookGrace{10'000};  // for a hook to end after its operation has failed

bool fills_its_storage(const at::Tensor& buffer) {
  return buffer.storage_offset() == 0 && buffer.storage().nbytes() == buffer.nbytes();
}

}  // namespace

StepRepair::StepRepair(Exchange& exchange, BucketStore& store)
    : exchange_(exchange), store_(store), elastic_(exchange.group.elastic()) {
  if (on()) backward_ = exchange.group.ring(c10::kCPU)->backward_unit();
}

void StepRepair::follow_members() {
  if (!on()) return;
  exchange_.group.follow_view();
  exchange_.compression.follow_members();
}

void StepRepair::as_unit(const std::string& what, const std::function<void()>& body) {
  if (!on()) return body();
  elastic_->run_unit([&] { return UnitDescription{.what = what}; },
                     [&](bool /*again*/) {
                       follow_members();
                       body();
                     });
  follow_members();
}

// In the first step of a view some ranks repeat it, and send at its end: so all ranks do.
void StepRepair::begin_step() {
  if (!on()) return;
  follow_members();
  view_ = elastic_->view();
  withholds_ = elastic_->first_unit();
  withheld_ = false;
  for (Kept& kept : kept_) kept.filled = false;
}

bool StepRepair::keep(Bucket& bucket) {
  if (kept_.size() < store_.size()) kept_.resize(store_.size());
  Kept& kept = kept_[bucket.index];
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor& buffer = bucket.buffer;
  if (bucket.sparse) {
    kept = {.spare = buffer.clone(), .copied = true, .filled = true};
    withheld_ = withheld_ || withholds_;
    return !withholds_;
  }
  if (!kept.spare.defined() || kept.spare.numel() != buffer.numel() || kept.spare.scalar_type() != buffer.scalar_type())
    kept.spare = at::zeros_like(buffer);  // a codec does not write between two gradients
  kept.copied = !fills_its_storage(buffer) || !fills_its_storage(kept.spare) ||
                !exchange_.buckets.leaves_input(bucket, exchange_.weights.on());
  kept.filled = true;
  bucket.result.reset();
  bucket.in_result = false;
  if (kept.copied)
    kept.spare.copy_(buffer);
  else
    bucket.result = kept.spare;
  withheld_ = withheld_ || withholds_;
  return !withholds_;
}

void StepRepair::restore() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t index = 0; index < store_.size(); ++index) {
    Bucket& bucket = store_[index];
    bucket.in_result = false;
    const BucketOperation operation = std::exchange(bucket.operation, {});
    try {
      if (operation.work) operation.work->wait();
      if (operation.future) wait_until_complete(*operation.future, kHookGrace);
    } catch (const std::exception&) {  // the view has changed
    }
    if (index < kept_.size() && kept_[index].filled && kept_[index].copied) bucket.buffer.copy_(kept_[index].spare);
  }
  follow_members();
  view_ = elastic_->view();
  withheld_ = withholds_ = false;
}

// Views of the bucket, such as a .grad, follow their storage's new memory; arrays and raw addresses do not.
void StepRepair::accept() {
  for (std::size_t index = 0; index < kept_.size() && index < store_.size(); ++index) {
    Bucket& bucket = store_[index];
    const at::Tensor result = std::exchange(bucket.result, {});
    if (!kept_[index].filled || !result.defined()) continue;
    const auto* from = static_cast<const std::byte*>(bucket.buffer.const_data_ptr());
    const auto* to = static_cast<const std::byte*>(result.const_data_ptr());
    const auto move_report = [&](const std::byte* of, std::ptrdiff_t by) {
      if (bucket.report && bucket.report->own >= of && bucket.report->own < of + bucket.buffer.nbytes())
        bucket.report->own += by;
    };
    if (store_.address_known(bucket)) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      bucket.buffer.copy_(result);
      move_report(to, from - to);
      continue;
    }
    c10::StorageImpl& mine = *bucket.buffer.storage().unsafeGetStorageImpl();
    c10::StorageImpl& other = *result.storage().unsafeGetStorageImpl();
    other.set_data_ptr_noswap(mine.set_data_ptr(other.set_data_ptr({})));
    move_report(from, to - from);
  }
}

Buckets::Buckets(Plan& plan, Exchange& exchange, GradientListener& listener)
    : pool(plan.options.gradient_pool),
      hooks(listener),
      store(plan.parameters, plan.buckets, hooks, exchange.weights.factors(), plan.options.own_gradients),
      left_over(plan.parameters, plan.buckets),
      repair(exchange, store),
      plan_(plan),
      exchange_(exchange) {
  start();
}

bool Buckets::sends_used_map() const {
  if (plan_.required() || exchange_.local() || store.empty()) return false;
  return !store[plan_.buckets.kept() - 1].carries_marks;
}

void Buckets::start() {
  hooks.detach();
  store.start();
  left_over.start();
  plan_.start();
  set_dtypes();
  attach();
}

void Buckets::attach() {
  if (!exchange_.local() || plan_.required() || plan_.options.weighted) hooks.attach(plan_.parameters.tensors());
}

void Buckets::lay_out_again() {
  plan_.describe_again();
  set_dtypes();
  store.drop();
}

void Buckets::set_dtypes() {
  for (std::size_t i = 0; i < plan_.parameters.size(); ++i)
    store.set_dtype(i, plan_.gradient_dtype_of(i), plan_.bucket_dtype_of(i));
}

bool Buckets::follow_learned_order() {
  const std::optional<bool> changed = plan_.follow_learned_order();
  if (changed.value_or(false)) store.drop();
  return changed.has_value();
}

void Buckets::allocate() {
  if (!store.empty() || exchange_.local()) return;
  const GradientPool::Scope scope = pool.scope();
  store.allocate(/*marks=*/!plan_.required() && !exchange_.buckets.has_hook() && !exchange_.group.host_control());
  assign_reductions();
}

void Buckets::assign_reductions() {
  for (std::size_t index = 0; index < store.size(); ++index) {
    store[index].reduction = plan_.reductions.of_bucket(index);
    store[index].too_small = plan_.reductions.too_small(index);
  }
}

void Buckets::choose(const std::vector<int>& reduction_of_bucket) {
  plan_.reductions.choose(reduction_of_bucket);
  assign_reductions();
}

void Buckets::average_left_over(const std::vector<std::size_t>& due,
                                std::vector<std::pair<std::size_t, Bucket>>& means) {
  const double factor = due.empty() ? 1 : exchange_.weights.factor_of_left_over();
  for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
    if (!std::binary_search(due.begin(), due.end(), plan_.parameters.param_index(i))) continue;
    means.emplace_back(i, left_over.flat(i, plan_.bucket_dtype_of(i), factor));
    const NamedScope scope("last gradient of " + plan_.parameters.names()[i]);
    exchange_.buckets.average(means.back().second.buffer);
  }
}

}  // namespace ringdp
