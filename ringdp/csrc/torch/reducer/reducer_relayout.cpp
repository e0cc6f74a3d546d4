// Parameters that were frozen, unfrozen or replaced since the last layout: hooks and buckets are made anew.
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/reducer/messages.h"
#include "torch/reducer/reducer.h"
#include "torch/reducer/reducer_errors.h"

namespace ringdp {
namespace {

constexpr uint8_t kTrains = 1;
constexpr uint8_t kLeftOver = 2;  // frozen, with gradients that were not averaged

}  // namespace

void Reducer::follow_requires_grad() {
  const bool changed = module_parameters_.changed();
  // module.double() and the like give parameters other data, which hooks and buckets no longer fit. All ranks do that in
  // the same place, as they do the forward, and their modules were alike.
  bool other_data = false;
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    const at::Tensor& parameter = gradient_states_[i].parameter;
    other_data |= parameter.scalar_type() != gradient_states_[i].dtype ||
                  static_cast<std::size_t>(parameter.numel()) != plan_.gradients()[i].numel;
  }
  if (!changed && !other_data) return;
  const std::vector<std::size_t> frozen = module_parameters_.frozen();
  try {
    if (changed && group_size_ > 1) average_left_over(agree_about(frozen));
  } catch (...) {
    failed_ = current_error_text();
    throw;
  }
  std::vector<std::size_t> leaving;
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    if (std::binary_search(frozen.begin(), frozen.end(), gradient_states_[i].param_index)) leaving.push_back(i);
  }
  release_gradients(leaving);
  module_parameters_.accept();
  start_over();
}

void Reducer::replace_parameters(std::vector<ModuleParameter> parameters) {
  ReductionPlan before;  // goes when the lock is free: Python is told
  const Lock lock(mutex_);
  throw_if_failed();
  throw_if_unfinished(/*notify=*/false);
  std::unordered_set<const c10::TensorImpl*> staying;
  for (const ModuleParameter& one : parameters) staying.insert(one.tensor.unsafeGetTensorImpl());
  std::vector<std::size_t> leaving;
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    if (!staying.contains(gradient_states_[i].parameter.unsafeGetTensorImpl())) leaving.push_back(i);
  }
  release_gradients(leaving);
  module_parameters_ = TrainableParameters(std::move(parameters));
  before = std::exchange(reduction_plan_, {});
  residuals_.clear();
  bucket_reducer_.set_watching(looks_for_non_finite());
  warned_ = false;
  start_over();
}

std::vector<int64_t> Reducer::find(const std::vector<at::Tensor>& tensors) {
  const Lock lock(mutex_);
  std::unordered_map<const c10::TensorImpl*, int64_t> numbers;
  for (std::size_t i = 0; i < module_parameters_.size(); ++i) {
    numbers.emplace(module_parameters_[i].tensor.unsafeGetTensorImpl(), static_cast<int64_t>(i));
  }
  std::vector<int64_t> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const auto found = numbers.find(tensor.unsafeGetTensorImpl());
    result.push_back(found == numbers.end() ? -1 : found->second);
  }
  return result;
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
  arrival_order_.clear();
  learned_graph_ = false;
  set_hooks();
}

// The parameters among `frozen` for which some rank has gradients that were not averaged.
std::vector<std::size_t> Reducer::agree_about(const std::vector<std::size_t>& frozen) {
  std::vector<uint8_t> mine(module_parameters_.size());
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = module_parameters_[i].tensor.requires_grad() ? kTrains : 0;
  for (const GradientState& gradient_state : gradient_states_) {
    if (gradient_state.local && gradient_state.parameter.grad().defined())
      mine[gradient_state.param_index] |= kLeftOver;
  }
  const std::string change = module_parameters_.describe_change();
  std::vector<std::vector<uint8_t>> all;
  try {
    all = gather_bytes(*bucket_reducer_.group(), mine,
                       options_.host_control ? c10::Device(c10::kCPU) : module_parameters_[0].tensor.device(), change);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMismatch) throw;
    ErrorContext context = error.context();
    context.name = change;
    context.advice = "freeze and unfreeze the same parameters on all ranks, before the same forward";
    throw Error(error.kind(), "before this forward " + change + ", and not all ranks did the same: " + error.what(),
                context);
  }
  throw_where_they_differ(all);
  std::vector<std::size_t> left_over;
  for (std::size_t i : frozen) {
    if (std::any_of(all.begin(), all.end(), [i](const auto& rank) { return (rank[i] & kLeftOver) != 0; }))
      left_over.push_back(i);
  }
  return left_over;
}

void Reducer::throw_where_they_differ(const std::vector<std::vector<uint8_t>>& all) const {
  std::vector<std::vector<bool>> trains;
  for (const auto& rank : all) {
    std::vector<bool>& one = trains.emplace_back();
    for (const uint8_t flags : rank) one.push_back((flags & kTrains) != 0);
  }
  std::vector<std::string> names;
  for (std::size_t i = 0; i < module_parameters_.size(); ++i) names.push_back(module_parameters_[i].name);
  const Disagreement found = requires_grad_disagreement(trains, names);
  if (found.text.empty()) return;
  ErrorContext context;
  context.rank = bucket_reducer_.group()->getRank();
  context.name = found.first_name;
  context.advice = "freeze and unfreeze the same parameters on all ranks, before the same forward";
  throw Error(ErrorKind::kMismatch, found.text + " Freeze and unfreeze the same on all ranks, before the same forward.",
              context);
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
      const NamedScope scope("last gradient of " + names_[i]);
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
