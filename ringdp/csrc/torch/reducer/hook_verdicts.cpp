#include "torch/reducer/hook_verdicts.h"

namespace ringdp {
namespace {

HookReduction* as_hook(Reduction* reduction) { return dynamic_cast<HookReduction*>(reduction); }

}  // namespace

HookVerdicts::HookVerdicts(const ReductionAssignment& reductions, const BucketStore& buckets, int64_t step) {
  if (reductions.none()) return;
  for (const Bucket& bucket : buckets) {
    HookReduction* hook = as_hook(bucket.reduction);
    if (hook != nullptr && hook->enabled() && bucket.sent_in == step) hooks_.try_emplace(hook);
  }
  if (!none()) alive_ = reductions.all().reductions;
}

void HookVerdicts::ask() {
  for (auto& [reduction, hook] : hooks_) hook.finite = reduction->finite();
}

std::optional<bool> HookVerdicts::of(const Reduction* reduction) const {
  const auto found = hooks_.find(as_hook(const_cast<Reduction*>(reduction)));
  return found == hooks_.end() ? std::nullopt : found->second.finite;
}

void HookVerdicts::note_unused(const ReductionAssignment& reductions, const TrainableParameters& parameters,
                               const UsedMap& used) {
  if (none()) return;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (used.used_somewhere(i)) continue;
    const auto found = hooks_.find(as_hook(reductions.of_parameter(parameters.param_index(i))));
    if (found != hooks_.end()) found->second.unused.push_back(parameters.names()[i]);
  }
}

void HookVerdicts::commit(bool finite) const {
  for (const auto& [reduction, hook] : hooks_) reduction->commit(finite, hook.unused);
}

}  // namespace ringdp
