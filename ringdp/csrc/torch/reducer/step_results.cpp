#include "torch/reducer/step_results.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/real.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "base/naming.h"
#include "torch/backend/process_group.h"
#include "torch/device/device_codec.h"
#include "torch/reducer/messages.h"

namespace ringdp {

void UsedMap::write(const at::Tensor& marks) const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  marks.fill_(1);
  bool lacking = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (arrivals_.used(i)) continue;
    marks.select(0, static_cast<int64_t>(i)).zero_();
    lacking = true;
  }
  if (!lacking) marks.select(0, static_cast<int64_t>(parameters_.size())).zero_();
}

namespace {

struct Sent {
  at::Tensor map;
  c10::intrusive_ptr<c10d::Work> work;
};

Sent send_map(const std::vector<int32_t>& used, const at::Tensor& parameter, ReducerGroup& group,
              const std::string& note = {}) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor map = at::tensor(used, at::kInt).to(group.control_device(parameter));
  const NamedScope scope("which parameters were used" + note);
  std::vector<at::Tensor> tensors{map};
  return {map, group.process_group()->allreduce(tensors)};
}

}  // namespace

void UsedMap::launch(const std::string& note) {
  std::vector<int32_t> used(parameters_.size() + 1, 0);
  for (std::size_t i = 0; i < parameters_.size(); ++i) (arrivals_.used(i) ? used[i] : used.back()) = 1;
  Sent sent = send_map(used, parameters_.tensors().front(), group_, note);
  map_ = std::move(sent.map);
  work_ = std::move(sent.work);
}

void shadow_used_map(const TrainableParameters& parameters, ReducerGroup& group, UsedHistory& history) {
  if (auto before = std::exchange(history.before, nullptr)) before->wait();
  const Sent sent = send_map(std::vector<int32_t>(parameters.size() + 1, 0), parameters.tensors().front(), group);
  group.wait(*sent.work, sent.map.device());
}

void UsedMap::read(const at::Tensor& marks, bool wanted, int64_t step, bool joining) {
  somewhere_.clear();
  some_rank_lacks_ = false;
  if (!plan_.required() && (wanted || looks_for_others(step, joining))) read_now(marks);
  // The host waits for it only when it reads it, or one backward later: the device's buckets have not ended either.
  if (group_.host_control()) {
    if (work_) group_.ring(c10::kCPU)->finish_before_shutdown(work_);
    std::swap(work_, history_.before);
  }
  if (auto work = std::exchange(work_, nullptr)) group_.wait(*work, map_.device());
}

void UsedMap::read_now(const at::Tensor& marks) {
  at::Tensor counts;
  if (work_) {
    group_.wait(*std::exchange(work_, nullptr), map_.device());
    counts = map_;
  } else {
    if (!marks.defined()) return;
    counts = at::real(marks);
  }
  const at::Tensor flags = counts.gt(0).cpu().contiguous();
  const bool* flag = flags.const_data_ptr<bool>();
  somewhere_.assign(flag, flag + parameters_.size());
  some_rank_lacks_ = flag[parameters_.size()];
}

bool UsedMap::looks_for_others(int64_t step, bool joining) const {
  if (!warns() || history_.ranks_named || joining) return false;
  if (group_.elastic()) return false;  // it takes an operation after the step
  const bool cheap = parameters_.tensors().front().is_cpu() && !group_.host_control();
  return group_.ranks() > 1 && (cheap || (step & (step - 1)) == 0);
}

void UsedMap::warn(const std::vector<std::size_t>& missing, int64_t step, bool joining) {
  if (!warns()) return;
  std::vector<std::vector<uint8_t>> ranks;
  if (looks_for_others(step, joining) && some_rank_lacks_) {
    history_.ranks_named = true;
    std::vector<uint8_t> mine;
    for (std::size_t i = 0; i < parameters_.size(); ++i) mine.push_back(arrivals_.used(i) ? 1 : 0);
    ranks = group_.gather(mine, group_.control_device(parameters_.tensors().front()), "which ranks lack gradients");
  }
  if (missing.empty() || std::exchange(history_.warned, true)) return;
  const std::string which = ranks.empty() ? unused_here(missing, somewhere_, parameters_.names())
                                          : unused_by_ranks(ranks, parameters_.names());
  TORCH_WARN("ringdp: parameters without gradient in step ", step, " on rank ", group_.rank(), ".\n", which,
             "\nThis comes once; find_unused_parameters=True: it is intended, False: it is an error.");
}

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
