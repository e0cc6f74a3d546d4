#include "torch/reducer/overflow_report.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "torch/device/device_codec.h"

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

namespace {

bool all_finite(const at::Tensor& values) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::isfinite(values).all().item<bool>();
}

}  // namespace

void OverflowReport::begin_backward() {
  finite_.reset();
  flags_.clear();
  own_non_finite_ = -1;
}

const OverflowReport::Flag& OverflowReport::flag_on(c10::Device device) {
  if (!flags_.contains(device)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto options = at::TensorOptions().dtype(at::kInt).device(device);
    flags_.emplace(device, Flag{at::zeros({1}, options), c10::impl::VirtualGuardImpl(device.type()).getStream(device)});
  }
  return flags_.at(device);
}

void OverflowReport::collect(const BucketStore& buckets, int64_t step, const HookVerdicts& hooks,
                             bool look_at_results) {
  bool known = true;
  bool finite = true;
  own_non_finite_ = -1;
  for (const Bucket& bucket : buckets) {
    if (bucket.sent_in != step) continue;
    std::optional<bool> one;
    if (bucket.report) {
      one = bucket.report->finite;
      if (own_non_finite_ < 0 && bucket.report->own != nullptr)
        own_non_finite_ = parameter_at(bucket, bucket.report->own);
    } else if (const auto verdict = hooks.of(bucket.reduction)) {
      one = verdict;
    } else if (bucket.codes.non_finite.defined()) {
      continue;  // its device has the flag
    } else if (look_at_results && watches()) {
      one = look_at(bucket);
    }
    known &= one.has_value();
    finite &= one.value_or(true);
  }
  finite_ = known || !finite ? std::optional(finite) : std::nullopt;
}

// Sparse gradients, and other backends' results. Not on a device, where this would wait for the device.
std::optional<bool> OverflowReport::look_at(const Bucket& bucket) {
  const at::Tensor& result = bucket.sparse ? bucket.buffer._values() : bucket.gradients;
  if (result.is_cpu()) return all_finite(result);
  return flag_result(result) ? std::optional(true) : std::nullopt;
}

// The check of a result on a device sets the flag there, on which the residuals' commit depends. True if it does.
bool OverflowReport::flag_result(const at::Tensor& result) {
  const auto flag = flags_.find(result.device());
  if (flag == flags_.end() || !(result.is_floating_point() || result.is_complex())) return false;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor real = result.is_complex() ? at::view_as_real(result) : result;
  const c10::impl::VirtualGuardImpl device(result.device().type());
  const c10::OptionalDeviceGuard guard(result.device());
  device_codec(result.device().type())
      ->find_non_finite(real.contiguous(), flag->second.seen.mutable_data_ptr<int32_t>(),
                        device.getStream(result.device()));
  return true;
}

int64_t OverflowReport::parameter_at(const Bucket& bucket, const std::byte* address) const {
  const auto* begin = static_cast<const std::byte*>(bucket.buffer.const_data_ptr());
  const auto element = static_cast<std::size_t>(address - begin) / bucket.buffer.element_size();
  const auto& offsets = bucket.memory.offsets;
  const auto behind = std::upper_bound(offsets.begin(), offsets.end(), element);
  if (behind == offsets.begin()) return -1;
  const auto position = static_cast<std::size_t>(behind - offsets.begin()) - 1;
  return static_cast<int64_t>(parameters_.param_index(bucket.members[position]));
}

std::optional<bool> OverflowReport::finite() {
  for (const auto& [device, flag] : flags_)
    if (flag.seen.item<int32_t>() != 0) finite_ = false;
  return finite_;
}

Residuals::Flags OverflowReport::flags() const {
  Residuals::Flags flags;
  for (const auto& [device, flag] : flags_) flags[device] = flag.seen;
  return flags;
}

std::vector<std::size_t> OverflowReport::non_finite() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& grad = parameters_.tensors()[i].grad();
    if (grad.defined() && !all_finite(grad.is_sparse() ? grad._values() : grad))
      result.push_back(parameters_.param_index(i));
  }
  return result;
}

}  // namespace ringdp
