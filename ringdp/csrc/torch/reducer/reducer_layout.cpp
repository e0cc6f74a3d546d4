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

// With the parameters that require grad now.
void Reducer::start() {
  hooks_.detach();
  arrivals_.start(parameters_.size());
  store_.start();
  plan_.start(describe_gradients());
  planned_anew();
  set_hooks();
}

// For the plan; this depends on their reductions.
std::vector<PlannedGradient> Reducer::describe_gradients() {
  std::vector<PlannedGradient> gradients;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    gradients.push_back(planned(parameters_.param_index(i)));
    store_.set_dtype(i, bucket_dtype(parameters_.param_index(i)));
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
  store_.drop();
}

// At the first forward that needs it, not at construction: a hook may still be registered, and evaluation needs none.
void Reducer::allocate() {
  if (!store_.empty() || local()) return;
  store_.allocate(/*marks=*/options_.unused != UnusedParameters::kForbidden && !bucket_reducer_.has_hook() &&
                  !group_.host_control());
  for (Bucket& bucket : store_) bucket.reduction = bucket_reduction(bucket.index);
}

}  // namespace ringdp
