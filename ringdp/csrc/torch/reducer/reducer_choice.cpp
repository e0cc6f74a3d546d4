// Buckets whose reduction changes while the layout stays: which one each has now, and what becomes of its residual.
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "base/error.h"
#include "collective/compressed_plan.h"
#include "torch/backend/process_group.h"
#include "torch/reducer/reducer.h"

namespace ringdp {

int Reducer::reduction_of_bucket(std::size_t bucket) const {
  const std::size_t first = parameters_.param_index(plan_.buckets()[bucket].front());
  const Reduction* reduction = reduction_of(first);
  if (reduction == nullptr) return -1;
  if (dynamic_cast<const AutoReduction*>(reduction) == nullptr) return reduction_plan_.reduction_of[first];
  return chosen_.empty() ? -1 : chosen_[bucket];
}

// Of buckets with AutoReduction that one where nothing else was chosen.
Reduction* Reducer::bucket_reduction(std::size_t bucket) const {
  const int index = reduction_of_bucket(bucket);
  return index < 0 ? reduction_of(parameters_.param_index(plan_.buckets()[bucket].front()))
                   : reduction_plan_.reductions[static_cast<std::size_t>(index)].get();
}

void Reducer::choose(const std::vector<int>& reduction_of_bucket) {
  const Lock lock(mutex_);
  failure_.throw_if_failed(backward_.step());
  if (backward_.active()) throw Error(ErrorKind::kState, "reductions of buckets cannot be chosen during a backward");
  if (reduction_of_bucket.size() != plan_.buckets().size())
    throw Error(ErrorKind::kValue, "reductions for " + std::to_string(reduction_of_bucket.size()) +
                                       " buckets; there are " + std::to_string(plan_.buckets().size()));
  for (std::size_t index = 0; index < plan_.buckets().size(); ++index) {
    const int reduction = reduction_of_bucket[index];
    if (reduction < 0) continue;
    if (reduction >= static_cast<int>(reduction_plan_.reductions.size()))
      throw Error(ErrorKind::kValue, "reduction " + std::to_string(reduction) + " is out of range: the plan has " +
                                         std::to_string(reduction_plan_.reductions.size()));
    if (dynamic_cast<const AutoReduction*>(reduction_of(parameters_.param_index(plan_.buckets()[index].front()))) ==
        nullptr)
      throw Error(ErrorKind::kValue,
                  describe_bucket(index, plan_.buckets()[index], parameters_.names()) + " has a reduction of its own");
  }
  chosen_ = reduction_of_bucket;
  for (Bucket& bucket : store_) bucket.reduction = bucket_reduction(bucket.index);
}

// ---- Residuals. Where this rank owns the mean, a residual holds what the mean lacks; elsewhere it holds what this rank's
// gradient lacks (docs/reference/wire_format.md).

// `residual` lies in memory as the gradient does.
void Reducer::scale_owned_part(std::size_t param_index, const at::Tensor& residual, float factor) const {
  ProcessGroupRing* ring = group_.ring(c10::kCPU);
  if (ring == nullptr) return;
  const auto count = static_cast<std::size_t>(residual.numel());
  for (const auto& [begin, end] :
       owned_elements(ring->group()->view(), count, reduction_plan_.owner_offsets[param_index]))
    residual.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin)).mul_(factor);
}

bool Reducer::has_residual(const Bucket& bucket) const {
  if (dynamic_cast<const AutoReduction*>(bucket.reduction) == nullptr) return false;
  return std::any_of(bucket.members.begin(), bucket.members.end(),
                     [&](std::size_t member) { return residuals_.all().contains(parameters_.param_index(member)); });
}

// An exact bucket sends what earlier codes left out. When the step counts, no residual remains.
void Reducer::add_residual(Bucket& bucket) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const float scale = residual_scale();
  const auto ranks = static_cast<float>(group_.ranks_with_input());
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    const std::size_t param_index = parameters_.param_index(bucket.members[position]);
    const auto found = residuals_.all().find(param_index);
    if (found == residuals_.all().end()) continue;
    const Residuals::Pair& pair = found->second;
    const at::Tensor residual = pair.current().clone();
    scale_owned_part(param_index, residual, ranks);
    const auto numel = static_cast<int64_t>(bucket.memory.lengths[position]);
    bucket.gradients.flatten()
        .narrow(0, static_cast<int64_t>(bucket.memory.offsets[position]), numel)
        .add_(residual, scale);
    bucket.residuals.push_back(residual);  // so that `commit_residuals` knows
  }
}

std::map<std::size_t, at::Tensor> Reducer::take_residuals(const std::vector<std::size_t>& parameters) {
  const Lock lock(mutex_);
  if (backward_.active()) throw Error(ErrorKind::kState, "residuals cannot be taken during a backward");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::map<std::size_t, at::Tensor> result;
  for (const std::size_t index : parameters) {
    const auto found = residuals_.all().find(index);
    if (found == residuals_.all().end()) continue;
    const at::Tensor residual = found->second.current().clone();
    scale_owned_part(index, residual, static_cast<float>(group_.ranks()));
    result[index] = residual;
    residuals_.drop(index);
  }
  return result;
}

void Reducer::give_residuals(const std::map<std::size_t, at::Tensor>& residuals) {
  const Lock lock(mutex_);
  if (backward_.active()) throw Error(ErrorKind::kState, "residuals cannot be set during a backward");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [index, values] : residuals) {
    if (index >= parameters_.all().size() || values.numel() != parameters_.all()[index].tensor.numel())
      throw Error(ErrorKind::kValue, "the residual of parameter " + std::to_string(index) + " has " +
                                         std::to_string(values.numel()) + " elements");
    const at::Tensor own = values.flatten().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    scale_owned_part(index, own, 1.0f / static_cast<float>(group_.ranks()));
    residuals_.set(index, own);
  }
}

}  // namespace ringdp
