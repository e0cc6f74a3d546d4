#include "torch/reducer/reduction_assignment.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "codec/plugin.h"
#include "torch/backend/process_group.h"
#include "torch/device/device_codec.h"
#include "torch/reducer/messages.h"

namespace ringdp {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorKind::kValue, text); }

}  // namespace

void ReductionAssignment::check(const ReductionPlan& reductions) const {
  if (reductions.reductions.empty()) return;
  const std::vector<ModuleParameter>& all = parameters_.all();
  if (reductions.reduction_of.size() != all.size() || reductions.owner_offsets.size() != all.size())
    refuse("one reduction and one owner offset for each of " + std::to_string(all.size()) + " parameters");
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int index = reductions.reduction_of[i];
    if (index >= static_cast<int>(reductions.reductions.size())) {
      refuse("parameter " + all[i].name + " has reduction " + std::to_string(index) + " of " +
             std::to_string(reductions.reductions.size()));
    }
    const auto* native = index < 0 ? nullptr : dynamic_cast<const CodecReduction*>(reductions.reductions[index].get());
    if (native == nullptr || group_.ranks() == 1) continue;
    const c10::Device device = all[i].tensor.device();
    if (is_plugin(native->codec()) && !device.is_cpu()) {
      refuse("the codec " + native->name() + " for parameter " + all[i].name +
             " is a C library's, for tensors on the CPU; this one is on " + device.str());
    }
    const bool possible = reductions.exchange_codes ? device_codec(device.type()) != nullptr
                                                    : device.is_cpu() && group_.ring(device.type()) != nullptr;
    if (!possible) {
      refuse("the codec " + native->name() + " for parameter " + all[i].name +
             (reductions.exchange_codes ? " needs kernels for the parameter's device; this one is on "
                                        : " needs the backend ring and a parameter on the CPU; this one is on ") +
             device.str() + " and is reduced by " +
             group_.process_group()->getBackend(device.type())->getBackendName() +
             "; TORCH_DISTRIBUTED_DEBUG=DETAIL hides ring, too");
    }
  }
}

ReductionPlan ReductionAssignment::replace(ReductionPlan reductions) {
  return std::exchange(reductions_, std::move(reductions));
}

Reduction* ReductionAssignment::of_parameter(std::size_t param_index) const {
  if (none()) return nullptr;
  const ModuleParameter& parameter = parameters_.all()[param_index];
  const int index = reductions_.reduction_of[param_index];
  if (index < 0 || parameter.sparse || !parameter.tensor.is_floating_point()) return nullptr;
  return reductions_.reductions[static_cast<std::size_t>(index)].get();
}

void ReductionAssignment::choose(const std::vector<int>& reduction_of_bucket) {
  const std::size_t buckets = plan_.buckets().size();
  if (reduction_of_bucket.size() != buckets)
    refuse("reductions for " + std::to_string(reduction_of_bucket.size()) + " buckets; there are " +
           std::to_string(buckets));
  for (std::size_t index = 0; index < buckets; ++index) {
    const int reduction = reduction_of_bucket[index];
    if (reduction < 0) continue;
    if (reduction >= static_cast<int>(reductions_.reductions.size()))
      refuse("reduction " + std::to_string(reduction) + " is out of range: the plan has " +
             std::to_string(reductions_.reductions.size()));
    if (!free(index))
      refuse(describe_bucket(index, plan_.buckets()[index], parameters_.names()) + " has a reduction of its own");
  }
  chosen_ = reduction_of_bucket;
}

bool ReductionAssignment::free(std::size_t bucket) const {
  return is_auto(of_parameter(parameters_.param_index(plan_.buckets()[bucket].front())));
}

int ReductionAssignment::number_of_bucket(std::size_t bucket) const {
  const std::size_t first = parameters_.param_index(plan_.buckets()[bucket].front());
  const Reduction* reduction = of_parameter(first);
  if (reduction == nullptr) return -1;
  if (!is_auto(reduction)) return too_small(bucket) ? -1 : reductions_.reduction_of[first];
  return chosen_.empty() ? -1 : chosen_[bucket];
}

bool ReductionAssignment::too_small(std::size_t bucket) const {
  const Reduction* reduction = of_parameter(parameters_.param_index(plan_.buckets()[bucket].front()));
  if (reductions_.exchange_codes || dynamic_cast<const CodecReduction*>(reduction) == nullptr) return false;
  const ProcessGroupRing* ring = group_.ring(c10::kCPU);
  return ring != nullptr && !ring->group()->sends_codes(plan_.dense_bytes(bucket));
}

Reduction* ReductionAssignment::of_bucket(std::size_t bucket) const {
  const int index = number_of_bucket(bucket);
  if (index < 0) return of_parameter(parameters_.param_index(plan_.buckets()[bucket].front()));
  return reductions_.reductions[static_cast<std::size_t>(index)].get();
}

bool ReductionAssignment::calls_back() const {
  return std::any_of(reductions_.reductions.begin(), reductions_.reductions.end(),
                     [](const auto& reduction) { return dynamic_cast<HookReduction*>(reduction.get()) != nullptr; });
}

void ReductionAssignment::set_divisor(int64_t divisor) const {
  for (const auto& reduction : reductions_.reductions) {
    if (auto* hook = dynamic_cast<HookReduction*>(reduction.get())) hook->set_divisor(divisor);
  }
}

}  // namespace ringdp
