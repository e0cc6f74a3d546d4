#include "torch/reducer/residuals.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "torch/device/device_codec.h"

namespace ringdp {
namespace {

at::TensorOptions floats_on(c10::Device device) { return at::TensorOptions().dtype(at::kFloat).device(device); }

c10::Stream current_stream(c10::Device device) {
  if (device.is_cpu()) return c10::Stream(c10::Stream::DEFAULT, device);
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// All flags combined in one on that device; undefined if there are none.
at::Tensor joined(const Residuals::Flags& flags, c10::Device device) {
  at::Tensor result;
  for (const auto& [where, flag] : flags) {
    const at::Tensor here = flag.to(device, /*non_blocking=*/!device.is_cpu());
    result = result.defined() ? at::maximum(result, here) : here;
  }
  return result;
}

}  // namespace

std::size_t Residuals::Pair::index() const {
  return index_ ? *index_ : static_cast<std::size_t>(which_.item<int32_t>());
}

int32_t* Residuals::Pair::which() const {
  if (!which_.defined())
    which_ = at::full({1}, static_cast<int64_t>(index()), floats_on(both_[0].device()).dtype(at::kInt));
  return which_.mutable_data_ptr<int32_t>();
}

cuda::Feedback Residuals::Pair::feedback(std::vector<at::Tensor>& kept) const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  cuda::Feedback result;
  for (std::size_t i = 0; i < both_.size(); ++i) result.both[i] = both_[i].mutable_data_ptr<float>();
  result.which = which();
  kept.insert(kept.end(), {both_[0], both_[1], which_});
  return result;
}

at::Tensor Residuals::current(const std::string& name) const {
  const auto found = pairs_.find(name);
  return found == pairs_.end() || !found->second.left_ ? at::Tensor() : found->second.current();
}

const Residuals::Pair& Residuals::write(const std::string& name, int64_t numel, c10::Device device) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Pair& pair = pairs_[name];
  const at::Tensor& first = pair.both_[0];
  if (!first.defined() || first.numel() != numel || first.device() != device) {
    pair = {};
    for (at::Tensor& memory : pair.both_) memory = at::zeros({numel}, floats_on(device));
  }
  pair.in_step_ = Pair::InStep::kWritten;
  return pair;
}

at::Tensor Residuals::send(const std::string& name) {
  const auto found = pairs_.find(name);
  if (found == pairs_.end()) return {};
  found->second.in_step_ = Pair::InStep::kSent;
  return found->second.current();
}

void Residuals::commit(const Flags& non_finite, const Names& unused) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::unordered_map<c10::Device, std::vector<int32_t*>> on_device;
  for (auto one = pairs_.begin(); one != pairs_.end();) {
    auto& [name, pair] = *one;
    const Pair::InStep in_step = std::exchange(pair.in_step_, Pair::InStep::kUntouched);
    const bool counts = in_step != Pair::InStep::kUntouched && !unused.contains(name);
    if (counts && in_step == Pair::InStep::kSent) {
      one = pairs_.erase(one);
      continue;
    }
    ++one;
    if (!counts) continue;
    if (!non_finite.empty() || pair.which_.defined()) on_device[pair.both_[0].device()].push_back(pair.which());
    if (!non_finite.empty())
      pair.index_.reset();
    else if (pair.index_)
      pair.index_ = 1 - *pair.index_;
    pair.left_ = true;
  }
  for (const auto& [device, which] : on_device) {
    const at::Tensor flag = joined(non_finite, device);
    const int32_t* seen = flag.defined() ? flag.const_data_ptr<int32_t>() : nullptr;
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional(device));
    device_codec(device.type())->commit(which, seen, current_stream(device));
  }
}

void Residuals::drop_step() {
  for (auto& [_, pair] : pairs_) pair.in_step_ = Pair::InStep::kUntouched;
}

void Residuals::set(const std::string& name, const at::Tensor& current) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Pair& pair = pairs_[name] = {};
  pair.both_[0] = current.detach().reshape({-1}).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  pair.both_[1] = at::zeros_like(pair.both_[0]);
  pair.left_ = true;
}

}  // namespace ringdp
