// Buckets whose method changes while the layout stays: which one each has now, and what error feedback owes when it goes.
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "base/error.h"
#include "collective/compressed_plan.h"
#include "torch/reducer.h"
#include "torch/ring_of.h"

namespace ringdp {

int Reducer::method_of_bucket(std::size_t bucket) const {
  const Slot& first = slots_[layout_[bucket].front()];
  if (first.method == nullptr) return -1;
  if (dynamic_cast<const ChosenMethod*>(first.method) == nullptr) return methods_.method_of[first.watched];
  return chosen_.empty() ? -1 : chosen_[bucket];
}

// Of buckets with ChosenMethod that one where nothing else was chosen.
Method* Reducer::bucket_method(std::size_t bucket) const {
  const int index = method_of_bucket(bucket);
  return index < 0 ? slots_[layout_[bucket].front()].method : methods_.methods[static_cast<std::size_t>(index)].get();
}

void Reducer::choose(const std::vector<int>& method_of_bucket) {
  const Lock lock(mutex_);
  throw_if_failed();
  if (active_) throw Error(ErrorKind::kState, "methods of buckets cannot be chosen during a backward");
  if (method_of_bucket.size() != layout_.size())
    throw Error(ErrorKind::kValue, "methods for " + std::to_string(method_of_bucket.size()) + " buckets; there are " +
                                       std::to_string(layout_.size()));
  for (std::size_t index = 0; index < layout_.size(); ++index) {
    const int method = method_of_bucket[index];
    if (method < 0) continue;
    if (method >= static_cast<int>(methods_.methods.size()))
      throw Error(ErrorKind::kValue, "there is no method " + std::to_string(method));
    if (dynamic_cast<const ChosenMethod*>(slots_[layout_[index].front()].method) == nullptr)
      throw Error(ErrorKind::kValue, describe_bucket(index, layout_[index], names_) + " has a method of its own");
  }
  chosen_ = method_of_bucket;
  for (Bucket& bucket : buckets_) bucket.method = bucket_method(bucket.index);
}

// ---- What is owed. A residual holds, where this rank owns the mean, what the mean lacks, and elsewhere what this rank's
// gradient lacks (docs/wire_format.md).

// `owed` lies in memory as the gradient does.
void Reducer::turn_owed(std::size_t watched, const at::Tensor& owed, float owned_by) const {
  ProcessGroupRing* ring = ring_of(*exchange_.group(), c10::DeviceType::CPU);
  if (ring == nullptr) return;
  const auto count = static_cast<std::size_t>(owed.numel());
  for (const auto& [begin, end] : owned_elements(ring->view(), count, methods_.turns[watched]))
    owed.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin)).mul_(owned_by);
}

bool Reducer::owes(const Bucket& bucket) const {
  if (dynamic_cast<const ChosenMethod*>(bucket.method) == nullptr) return false;
  return std::any_of(bucket.members.begin(), bucket.members.end(),
                     [&](std::size_t member) { return residuals_.all().contains(slots_[member].watched); });
}

// An exact bucket sends what earlier codes left out. When the step counts, nothing is owed any more.
void Reducer::pay(Bucket& bucket) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const float factor = residual_factor();
  const auto ranks = static_cast<float>(exchange_.divisor() == 0 ? group_size_ : exchange_.divisor());
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    const std::size_t watched = slots_[bucket.members[position]].watched;
    const auto found = residuals_.all().find(watched);
    if (found == residuals_.all().end()) continue;
    const Residuals::Pair& pair = found->second;
    const at::Tensor owed = pair.current().clone();
    turn_owed(watched, owed, ranks);
    const auto numel = static_cast<int64_t>(bucket.plan.lengths[position]);
    bucket.gradients.flatten().narrow(0, static_cast<int64_t>(bucket.plan.offsets[position]), numel).add_(owed, factor);
    bucket.residuals.push_back(owed);  // so that `commit_residuals` knows
  }
}

std::map<std::size_t, at::Tensor> Reducer::take_owed(const std::vector<std::size_t>& watched) {
  const Lock lock(mutex_);
  if (active_) throw Error(ErrorKind::kState, "residuals cannot be taken during a backward");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::map<std::size_t, at::Tensor> result;
  for (const std::size_t index : watched) {
    const auto found = residuals_.all().find(index);
    if (found == residuals_.all().end()) continue;
    const at::Tensor owed = found->second.current().clone();
    turn_owed(index, owed, static_cast<float>(group_size_));
    result[index] = owed;
    residuals_.drop(index);
  }
  return result;
}

void Reducer::give_owed(const std::map<std::size_t, at::Tensor>& owed) {
  const Lock lock(mutex_);
  if (active_) throw Error(ErrorKind::kState, "residuals cannot be set during a backward");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [index, values] : owed) {
    if (index >= watch_.size() || values.numel() != watch_[index].tensor.numel())
      throw Error(ErrorKind::kValue, "what is owed to parameter " + std::to_string(index) + " has " +
                                         std::to_string(values.numel()) + " elements");
    const at::Tensor own = values.flatten().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    turn_owed(index, own, 1.0f / static_cast<float>(group_size_));
    residuals_.set(index, own);
  }
}

}  // namespace ringdp
