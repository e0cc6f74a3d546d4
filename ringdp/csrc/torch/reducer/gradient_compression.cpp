#include "torch/reducer/gradient_compression.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "codec/plugin.h"
#include "collective/compressed_plan.h"
#include "torch/backend/process_group.h"
#include "torch/device/device_codec.h"
#include "torch/reducer/loss_scale.h"
#include "torch/reducer/messages.h"

namespace ringdp {
namespace {

bool is_auto(const Reduction* reduction) { return dynamic_cast<const AutoReduction*>(reduction) != nullptr; }

bool same_reduction(const Reduction* a, const Reduction* b) {
  if (is_auto(a) && is_auto(b)) return true;
  const auto* x = dynamic_cast<const CodecReduction*>(a);
  const auto* y = dynamic_cast<const CodecReduction*>(b);
  if (x == nullptr || y == nullptr) return a == b;
  return x->codec() == y->codec() && x->feedback() == y->feedback();
}

bool keeps_residuals(const Reduction* reduction) {
  if (const auto* chosen = dynamic_cast<const AutoReduction*>(reduction)) return chosen->feedback();
  const auto* native = dynamic_cast<const CodecReduction*>(reduction);
  return native != nullptr && native->feedback();
}

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorKind::kValue, text); }

}  // namespace

void GradientCompression::check(const ReductionPlan& plan) const {
  if (plan.reductions.empty()) return;
  const std::vector<ModuleParameter>& all = parameters_.all();
  if (plan.reduction_of.size() != all.size() || plan.owner_offsets.size() != all.size())
    refuse("one reduction and one owner offset for each of " + std::to_string(all.size()) + " parameters");
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int index = plan.reduction_of[i];
    if (index >= static_cast<int>(plan.reductions.size())) {
      refuse("parameter " + all[i].name + " has reduction " + std::to_string(index) + " of " +
             std::to_string(plan.reductions.size()));
    }
    const auto* native = index < 0 ? nullptr : dynamic_cast<const CodecReduction*>(plan.reductions[index].get());
    if (native == nullptr || group_.ranks() == 1) continue;
    const c10::Device device = all[i].tensor.device();
    if (is_plugin(native->codec()) && !device.is_cpu()) {
      refuse("the codec " + native->name() + " for parameter " + all[i].name +
             " is a C library's, for tensors on the CPU; this one is on " + device.str());
    }
    const bool possible = plan.exchange_codes ? device_codec(device.type()) != nullptr
                                              : device.is_cpu() && group_.ring(device.type()) != nullptr;
    if (!possible) {
      refuse("the codec " + native->name() + " for parameter " + all[i].name +
             (plan.exchange_codes ? " needs kernels for the parameter's device; this one is on "
                                  : " needs the backend ring and a parameter on the CPU; this one is on ") +
             device.str() + " and is reduced by " +
             group_.process_group()->getBackend(device.type())->getBackendName() +
             "; TORCH_DISTRIBUTED_DEBUG=DETAIL hides ring, too");
    }
  }
}

ReductionPlan GradientCompression::set(ReductionPlan plan) {
  std::vector<Reduction*> before(parameters_.all().size());
  for (std::size_t i = 0; i < before.size() && !none(); ++i) {
    if (reductions_.reduction_of[i] >= 0) before[i] = reductions_.reductions[reductions_.reduction_of[i]].get();
  }
  ReductionPlan replaced = std::exchange(reductions_, std::move(plan));
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Reduction* now = reduction_of(i);
    if (!keeps_residuals(now) || !same_reduction(before[i], now)) residuals_.drop(i);
  }
  return replaced;
}

ReductionPlan GradientCompression::clear() {
  residuals_.clear();
  return std::exchange(reductions_, {});
}

Reduction* GradientCompression::reduction_of(std::size_t param_index) const {
  if (none()) return nullptr;
  const ModuleParameter& parameter = parameters_.all()[param_index];
  const int index = reductions_.reduction_of[param_index];
  if (index < 0 || parameter.sparse || !parameter.tensor.is_floating_point()) return nullptr;
  return reductions_.reductions[static_cast<std::size_t>(index)].get();
}

void GradientCompression::choose(const std::vector<int>& reduction_of_bucket) {
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

bool GradientCompression::free(std::size_t bucket) const {
  return is_auto(reduction_of(parameters_.param_index(plan_.buckets()[bucket].front())));
}

int GradientCompression::number_of_bucket(std::size_t bucket) const {
  const std::size_t first = parameters_.param_index(plan_.buckets()[bucket].front());
  const Reduction* reduction = reduction_of(first);
  if (reduction == nullptr) return -1;
  if (!is_auto(reduction)) return reductions_.reduction_of[first];
  return chosen_.empty() ? -1 : chosen_[bucket];
}

Reduction* GradientCompression::of_bucket(std::size_t bucket) const {
  const int index = number_of_bucket(bucket);
  if (index < 0) return reduction_of(parameters_.param_index(plan_.buckets()[bucket].front()));
  return reductions_.reductions[static_cast<std::size_t>(index)].get();
}

// A power of two, so that residuals keep their bits when the scale changes; torch's scales are powers of two as a rule.
void GradientCompression::begin_backward() {
  double scale = loss_scale_of_backward();
  if (scale == 1.0) scale = program_scale_;
  scale_ = std::isfinite(scale) && scale > 0 ? static_cast<float>(std::exp2(std::floor(std::log2(scale)))) : 1.0f;
}

void GradientCompression::list_sections(Bucket& bucket, const CodecReduction& reduction, const at::Tensor& buffer,
                                        bool with_residuals) {
  auto* memory = buffer.mutable_data_ptr<float>();
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    const std::size_t param_index = parameters_.param_index(bucket.members[position]);
    CompressedSection section;
    section.x = memory + bucket.memory.offsets[position];
    section.count = bucket.memory.lengths[position];
    section.owner_offset = reductions_.owner_offsets[param_index];
    if (with_residuals && (reduction.feedback() || residuals_.all().contains(param_index))) {
      const auto numel = static_cast<int64_t>(section.count);
      const Residuals::Pair& pair = residuals_.of(param_index, numel, buffer.device());
      const cuda::Feedback feedback = pair.feedback();
      if (exchanges_codes()) {
        bucket.codes.feedback.push_back(feedback);
      } else {
        section.residual = feedback.both[*feedback.which];
        section.new_residual = feedback.both[1 - *feedback.which];
      }
      bucket.codes.residuals.insert(bucket.codes.residuals.end(), {pair.both[0], pair.both[1], pair.which});
    }
    bucket.codes.sections.push_back(section);
  }
}

void GradientCompression::add_residuals(Bucket& bucket) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    const std::size_t param_index = parameters_.param_index(bucket.members[position]);
    const auto found = residuals_.all().find(param_index);
    if (found == residuals_.all().end()) continue;
    const at::Tensor residual = found->second.current().clone();
    scale_owned_part(param_index, residual, static_cast<float>(group_.ranks_with_input()));
    bucket.gradients.flatten()
        .narrow(0, static_cast<int64_t>(bucket.memory.offsets[position]),
                static_cast<int64_t>(bucket.memory.lengths[position]))
        .add_(residual, scale_);
    bucket.codes.residuals.push_back(residual);  // so that `commit` knows
  }
}

void GradientCompression::commit(const BucketStore& buckets, int64_t step, const UsedMap& used,
                                 const OverflowReport& overflow) {
  if (!overflow.finite_on_host().value_or(true)) return;
  std::vector<std::size_t> written;
  std::vector<std::size_t> paid;
  for (const Bucket& bucket : buckets) {
    if (bucket.sent_in != step || bucket.codes.residuals.empty()) continue;
    auto& done = bucket.codes.sections.empty() ? paid : written;
    for (std::size_t member : bucket.members) {
      if (used.used_somewhere(member)) done.push_back(parameters_.param_index(member));
    }
  }
  for (const std::size_t param_index : paid) residuals_.drop(param_index);
  if (!written.empty()) residuals_.commit(written, overflow.flags());
}

bool GradientCompression::calls_back() const {
  return std::any_of(reductions_.reductions.begin(), reductions_.reductions.end(),
                     [](const auto& reduction) { return dynamic_cast<HookReduction*>(reduction.get()) != nullptr; });
}

void GradientCompression::set_divisor(int64_t divisor) const {
  for (const auto& reduction : reductions_.reductions) {
    if (auto* hook = dynamic_cast<HookReduction*>(reduction.get())) hook->set_divisor(divisor);
  }
}

HookVerdicts GradientCompression::used_hooks(const BucketStore& buckets, int64_t step) const {
  HookVerdicts used;
  if (none()) return used;
  for (const Bucket& bucket : buckets) {
    auto* reduction = dynamic_cast<HookReduction*>(bucket.reduction);
    if (reduction != nullptr && reduction->enabled() && bucket.sent_in == step)
      used.finite.emplace(reduction, std::nullopt);
  }
  if (!used.finite.empty()) used.alive = reductions_.reductions;
  return used;
}

void GradientCompression::ask_hooks(HookVerdicts& hooks) {
  for (auto& [reduction, finite] : hooks.finite) finite = reduction->finite();
}

GradientCompression::UnusedOf GradientCompression::unused_of_hooks(const UsedMap& used) const {
  UnusedOf unused;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (used.used_somewhere(i)) continue;
    auto* hook = dynamic_cast<HookReduction*>(reduction_of(parameters_.param_index(i)));
    if (hook != nullptr) unused[hook].push_back(parameters_.names()[i]);
  }
  return unused;
}

void GradientCompression::commit_hooks(const HookVerdicts& hooks, bool finite, const UnusedOf& unused) {
  for (const auto& [reduction, _] : hooks.finite) {
    const auto found = unused.find(reduction);
    reduction->commit(finite, found == unused.end() ? std::vector<std::string>() : found->second);
  }
}

// `residual` lies in memory as the gradient does.
void GradientCompression::scale_owned_part(std::size_t param_index, const at::Tensor& residual, float factor) const {
  ProcessGroupRing* ring = group_.ring(c10::kCPU);
  if (ring == nullptr) return;
  const auto count = static_cast<std::size_t>(residual.numel());
  for (const auto& [begin, end] : owned_elements(ring->group()->view(), count, reductions_.owner_offsets[param_index]))
    residual.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin)).mul_(factor);
}

GradientCompression::ByParameter GradientCompression::take_residuals(const std::vector<std::size_t>& param_indices) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ByParameter result;
  for (const std::size_t index : param_indices) {
    const auto found = residuals_.all().find(index);
    if (found == residuals_.all().end()) continue;
    const at::Tensor residual = found->second.current().clone();
    scale_owned_part(index, residual, static_cast<float>(group_.ranks()));
    result[index] = residual;
    residuals_.drop(index);
  }
  return result;
}

void GradientCompression::give_residuals(const ByParameter& residuals) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [index, values] : residuals) {
    if (index >= parameters_.all().size() || values.numel() != parameters_.all()[index].tensor.numel())
      refuse("the residual of parameter " + std::to_string(index) + " has " + std::to_string(values.numel()) +
             " elements");
    const at::Tensor own = values.flatten().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    scale_owned_part(index, own, 1.0f / static_cast<float>(group_.ranks()));
    residuals_.set(index, own);
  }
}

// A gradient lies in its bucket as its parameter lies in memory, where that is dense.
GradientCompression::ByParameter GradientCompression::residuals() const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ByParameter result;
  for (const auto& [index, pair] : residuals_.all())
    result[index] = as_parameter(pair.current(), parameters_.all()[index].tensor).flatten().cpu().clone();
  return result;
}

void GradientCompression::set_residuals(const ByParameter& residuals) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<ModuleParameter>& all = parameters_.all();
  for (const auto& [index, values] : residuals) {
    const std::string what = "a residual of " + std::to_string(values.numel()) + " elements for parameter ";
    if (index >= all.size()) refuse(what + std::to_string(index) + ", which does not exist");
    const bool kept = keeps_residuals(reduction_of(index));
    if (!kept || values.numel() != all[index].tensor.numel()) {
      refuse(what + all[index].name + ", which has " + std::to_string(all[index].tensor.numel()) +
             (kept ? " elements" : " elements and no error feedback"));
    }
  }
  residuals_.clear();
  for (const auto& [index, values] : residuals) {
    const at::Tensor& parameter = all[index].tensor;
    const at::Tensor current = at::empty({values.numel()}, parameter.options().dtype(at::kFloat));
    as_parameter(current, parameter).copy_(values.reshape(parameter.sizes()));
    residuals_.set(index, current);
  }
}

}  // namespace ringdp
