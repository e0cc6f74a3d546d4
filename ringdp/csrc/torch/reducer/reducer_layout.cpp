// Which gradient lies where: the parameters that require grad, their buckets, and the buckets' memory.
#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "torch/reducer/reducer.h"

namespace ringdp {
namespace {

// From here on a copy costs more than an operation of its own.
constexpr std::size_t kDirectBytes = std::size_t{4} << 20;

constexpr uint64_t kIdleGroup = uint64_t{1} << 63;

}  // namespace

// Sparse, integer and complex gradients are always exact.
Reduction* Reducer::reduction_of(std::size_t param_index) const {
  if (reduction_plan_.reductions.empty()) return nullptr;
  const int index = reduction_plan_.reduction_of[param_index];
  const bool plain =
      !module_parameters_[param_index].sparse && module_parameters_[param_index].tensor.is_floating_point();
  return index < 0 || !plain ? nullptr : reduction_plan_.reductions[static_cast<std::size_t>(index)].get();
}

LayoutItem Reducer::layout_item(std::size_t param_index) const {
  const ModuleParameter& parameter = module_parameters_[param_index];
  const c10::Device device = parameter.tensor.device();
  const c10::ScalarType dtype = bucket_dtype(param_index);
  const uint64_t reduction =
      reduction_of(param_index) == nullptr ? 0 : static_cast<uint64_t>(reduction_plan_.reduction_of[param_index]) + 1;
  LayoutItem item;
  item.group = (reduction << 40) | (static_cast<uint64_t>(device.type()) << 32) |
               (static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16) | static_cast<uint64_t>(dtype);
  item.numel = static_cast<std::size_t>(parameter.tensor.numel());
  item.element_bytes = c10::elementSize(dtype);
  const bool in_place = dtype == parameter.tensor.scalar_type();
  item.alone = parameter.sparse || (in_place && item.numel * item.element_bytes >= kDirectBytes);
  return item;
}

c10::ScalarType Reducer::bucket_dtype(std::size_t param_index) const {
  const ModuleParameter& parameter = module_parameters_[param_index];
  const c10::ScalarType own = parameter.tensor.scalar_type();
  if (parameter.sparse || !parameter.tensor.is_floating_point()) return own;
  return reduction_of(param_index) != nullptr ? at::kFloat : options_.reduce_dtype.value_or(own);
}

void Reducer::take_trainable() {
  std::unordered_set<const c10::TensorImpl*> local;
  for (const GradientState& gradient_state : gradient_states_) {
    if (gradient_state.local) local.insert(gradient_state.parameter.unsafeGetTensorImpl());
  }
  parameters_.clear();
  names_.clear();
  gradient_states_.clear();
  items_.clear();
  idle_.clear();
  for (std::size_t i = 0; i < module_parameters_.size(); ++i) {
    if (!module_parameters_.trains(i)) continue;
    parameters_.push_back(module_parameters_[i].tensor);
    names_.push_back(module_parameters_[i].name);
    GradientState gradient_state;
    gradient_state.parameter = module_parameters_[i].tensor;
    gradient_state.param_index = i;
    gradient_state.sparse = module_parameters_[i].sparse;
    gradient_state.local = local.contains(module_parameters_[i].tensor.unsafeGetTensorImpl());
    gradient_states_.push_back(std::move(gradient_state));
  }
  describe_items();
}

// Describes the parameters for the layout; this depends on their reductions.
void Reducer::describe_items() {
  items_.clear();
  for (GradientState& gradient_state : gradient_states_) {
    items_.push_back(layout_item(gradient_state.param_index));
    gradient_state.reduction = reduction_of(gradient_state.param_index);
    gradient_state.dtype = gradient_state.parameter.scalar_type();
    gradient_state.cast = bucket_dtype(gradient_state.param_index) != gradient_state.dtype;
  }
  set_idle(idle_);
}

// The reverse of registration, until the order in which gradients arrive is known.
void Reducer::plan_in_reverse() {
  std::vector<std::size_t> order(gradient_states_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  plan(order);
}

void Reducer::plan(std::span<const std::size_t> order) {
  order_.assign(order.begin(), order.end());
  layout_ = assign_buckets(items_, order, options_.caps_bytes);
  chosen_.clear();
  const auto busy = [&](const auto& members) { return idle_.empty() || !idle_[members.front()]; };
  const auto end = std::stable_partition(layout_.begin(), layout_.end(), busy);
  kept_ = static_cast<std::size_t>(end - layout_.begin());
  // The marks of used parameters are sent behind the gradients of the last bucket, so that must be an exact one with memory
  // of its own.
  const auto shared = [&](const auto& members) {
    return !items_[members.front()].alone && gradient_states_[members.front()].reduction == nullptr;
  };
  const auto last = std::find_if(std::make_reverse_iterator(end), layout_.rend(), shared);
  if (last != layout_.rend()) std::rotate(last.base() - 1, last.base(), end);
  count_traffic();
}

void Reducer::count_traffic() {
  stats_.buckets = stats_.bytes = 0;
  for (std::size_t index = 0; index < kept_; ++index) count_bucket(index);
}

void Reducer::count_bucket(std::size_t index) {
  ++stats_.buckets;
  for (std::size_t member : layout_[index]) {
    if (!gradient_states_[member].sparse)
      stats_.bytes += static_cast<int64_t>(items_[member].numel * items_[member].element_bytes);
  }
}

// Makes the layout anew in the known order, because reductions have changed.
void Reducer::lay_out_again() {
  describe_items();
  const std::vector<std::size_t> order = order_;
  plan(order);
  drop_memory();
}

// At the first forward that needs it, not at construction: a hook may still be registered, and evaluation needs none.
void Reducer::allocate() {
  if (!buckets_.empty() || local()) return;
  std::vector<Bucket> buckets(layout_.size());
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    Bucket& bucket = buckets[index];
    bucket.index = index;
    bucket.members = layout_[index];
    bucket.plan = plan_bucket(items_, bucket.members);
    bucket.name = describe_bucket(index, bucket.members, names_);
    bucket.pending = bucket.members.size();
    bucket.reduction = bucket_reduction(index);
    bucket.dtype = bucket_dtype(gradient_states_[bucket.members.front()].param_index);
    bucket.sparse = gradient_states_[bucket.members.front()].sparse;
    bucket.direct = !bucket.sparse && !carries_marks(index) && items_[bucket.members.front()].alone;
    for (std::size_t member : bucket.members) {
      gradient_states_[member].bucket = index;
      gradient_states_[member].direct = bucket.direct;
    }
  }
  buckets_ = std::move(buckets);
  for (std::size_t index = 0; index < kept_; ++index) give_memory(buckets_[index]);
}

bool Reducer::carries_marks(std::size_t bucket) const {
  return bucket + 1 == kept_ && options_.unused != UnusedParameters::kForbidden && !bucket_reducer_.has_hook() &&
         !compressed(bucket) && !options_.host_control;
}

// A bucket of idle parameters gets its memory when one of them has a gradient after all.
void Reducer::give_memory(Bucket& bucket) {
  if (bucket.sparse || bucket.direct || bucket.buffer.defined()) return;
  const std::size_t marks = carries_marks(bucket.index) ? parameters_.size() + 1 : 0;
  allocate_bucket(bucket, parameters_[bucket.members.front()].device(), marks);
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    GradientState& gradient_state = gradient_states_[bucket.members[position]];
    gradient_state.view = gradient_view(bucket, position, gradient_state.parameter);
  }
}

void Reducer::drop_memory() {
  buckets_.clear();
  for (GradientState& gradient_state : gradient_states_) gradient_state.view.reset();
}

// From the next layout on they share no bucket with the others.
void Reducer::set_idle(std::vector<bool> idle) {
  const auto busy = std::count(idle.begin(), idle.end(), false);
  idle_ = busy == 0 ? std::vector<bool>() : std::move(idle);
  for (std::size_t i = 0; i < idle_.size(); ++i) {
    items_[i].group = idle_[i] ? items_[i].group | kIdleGroup : items_[i].group & ~kIdleGroup;
  }
}

}  // namespace ringdp
