// Which gradient lies where: the parameters that require grad, their buckets, and the buckets' memory.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "torch/reducer/reducer.h"

namespace ringdp {
namespace {

// From here on a copy costs more than an operation of its own.
constexpr std::size_t kDirectBytes = std::size_t{4} << 20;

}  // namespace

// Sparse, integer and complex gradients are always exact.
Reduction* Reducer::reduction_of(std::size_t param_index) const {
  if (reduction_plan_.reductions.empty()) return nullptr;
  const int index = reduction_plan_.reduction_of[param_index];
  const bool plain =
      !parameters_.all()[param_index].sparse && parameters_.all()[param_index].tensor.is_floating_point();
  return index < 0 || !plain ? nullptr : reduction_plan_.reductions[static_cast<std::size_t>(index)].get();
}

PlannedGradient Reducer::planned(std::size_t param_index) const {
  const ModuleParameter& parameter = parameters_.all()[param_index];
  const c10::Device device = parameter.tensor.device();
  const c10::ScalarType dtype = bucket_dtype(param_index);
  PlannedGradient gradient;
  gradient.exact = reduction_of(param_index) == nullptr;
  const uint64_t reduction = gradient.exact ? 0 : static_cast<uint64_t>(reduction_plan_.reduction_of[param_index]) + 1;
  gradient.group = (reduction << 40) | (static_cast<uint64_t>(device.type()) << 32) |
                   (static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16) | static_cast<uint64_t>(dtype);
  gradient.numel = static_cast<std::size_t>(parameter.tensor.numel());
  gradient.element_bytes = c10::elementSize(dtype);
  gradient.sparse = parameter.sparse;
  const bool in_place = dtype == parameter.tensor.scalar_type();
  gradient.alone = parameter.sparse || (in_place && gradient.bytes() >= kDirectBytes);
  return gradient;
}

c10::ScalarType Reducer::bucket_dtype(std::size_t param_index) const {
  const ModuleParameter& parameter = parameters_.all()[param_index];
  const c10::ScalarType own = parameter.tensor.scalar_type();
  if (parameter.sparse || !parameter.tensor.is_floating_point()) return own;
  return reduction_of(param_index) != nullptr ? at::kFloat : options_.reduce_dtype.value_or(own);
}

void Reducer::take_trainable() {
  std::unordered_set<const c10::TensorImpl*> local;
  for (const GradientState& gradient_state : gradient_states_) {
    if (gradient_state.local) local.insert(gradient_state.parameter.unsafeGetTensorImpl());
  }
  gradient_states_.clear();
  arrivals_.start(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    GradientState gradient_state;
    gradient_state.parameter = parameters_.tensors()[i];
    gradient_state.param_index = parameters_.param_index(i);
    gradient_state.sparse = parameters_[i].sparse;
    gradient_state.local = local.contains(gradient_state.parameter.unsafeGetTensorImpl());
    gradient_states_.push_back(std::move(gradient_state));
  }
}

// For the plan; this depends on their reductions.
std::vector<PlannedGradient> Reducer::describe_gradients() {
  std::vector<PlannedGradient> gradients;
  for (GradientState& gradient_state : gradient_states_) {
    gradients.push_back(planned(gradient_state.param_index));
    gradient_state.reduction = reduction_of(gradient_state.param_index);
    gradient_state.dtype = gradient_state.parameter.scalar_type();
    gradient_state.cast = bucket_dtype(gradient_state.param_index) != gradient_state.dtype;
  }
  return gradients;
}

void Reducer::planned_anew() {
  chosen_.clear();
  count_traffic();
}

void Reducer::count_traffic() {
  stats_.buckets = stats_.bytes = 0;
  for (std::size_t index = 0; index < plan_.kept(); ++index) count_bucket(index);
}

void Reducer::count_bucket(std::size_t index) {
  ++stats_.buckets;
  stats_.bytes += static_cast<int64_t>(plan_.dense_bytes(index));
}

// Reductions have changed.
void Reducer::lay_out_again() {
  plan_.describe_again(describe_gradients());
  planned_anew();
  drop_memory();
}

// At the first forward that needs it, not at construction: a hook may still be registered, and evaluation needs none.
void Reducer::allocate() {
  if (!buckets_.empty() || local()) return;
  std::vector<Bucket> buckets(plan_.buckets().size());
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    Bucket& bucket = buckets[index];
    bucket.index = index;
    bucket.members = plan_.buckets()[index];
    bucket.memory = plan_.memory(index);
    bucket.name = describe_bucket(index, bucket.members, parameters_.names());
    bucket.reduction = bucket_reduction(index);
    bucket.dtype = bucket_dtype(gradient_states_[bucket.members.front()].param_index);
    bucket.sparse = gradient_states_[bucket.members.front()].sparse;
    bucket.direct = !bucket.sparse && !carries_marks(index) && plan_.gradients()[bucket.members.front()].alone;
    for (std::size_t member : bucket.members) gradient_states_[member].direct = bucket.direct;
  }
  buckets_ = std::move(buckets);
  for (std::size_t index = 0; index < plan_.kept(); ++index) give_memory(buckets_[index]);
}

bool Reducer::carries_marks(std::size_t bucket) const {
  return plan_.may_carry_marks(bucket) && options_.unused != UnusedParameters::kForbidden &&
         !bucket_reducer_.has_hook() && !group_.host_control();
}

// A bucket of idle parameters gets its memory when one of them has a gradient after all.
void Reducer::give_memory(Bucket& bucket) {
  if (bucket.sparse || bucket.direct || bucket.buffer.defined()) return;
  const std::size_t marks = carries_marks(bucket.index) ? parameters_.size() + 1 : 0;
  allocate_bucket(bucket, parameters_.tensors()[bucket.members.front()].device(), marks);
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    GradientState& gradient_state = gradient_states_[bucket.members[position]];
    gradient_state.view = gradient_view(bucket, position, gradient_state.parameter);
  }
}

void Reducer::drop_memory() {
  buckets_.clear();
  for (GradientState& gradient_state : gradient_states_) gradient_state.view.reset();
}

}  // namespace ringdp
