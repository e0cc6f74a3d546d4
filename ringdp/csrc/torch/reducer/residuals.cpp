#include "torch/reducer/residuals.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
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

at::Tensor Residuals::Pair::current() const { return both[static_cast<std::size_t>(which.item<int32_t>())]; }

cuda::Feedback Residuals::Pair::feedback() const {
  cuda::Feedback result;
  for (std::size_t i = 0; i < both.size(); ++i) result.both[i] = both[i].mutable_data_ptr<float>();
  result.which = which.const_data_ptr<int32_t>();
  return result;
}

const Residuals::Pair& Residuals::of(std::size_t parameter, int64_t numel, c10::Device device) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Pair& pair = pairs_[parameter];
  const at::Tensor& first = pair.both[0];
  if (first.defined() && first.numel() == numel && first.device() == device) return pair;
  for (at::Tensor& memory : pair.both) memory = at::zeros({numel}, floats_on(device));
  pair.which = at::zeros({1}, floats_on(device).dtype(at::kInt));
  return pair;
}

void Residuals::commit(const std::vector<std::size_t>& parameters, const Flags& non_finite) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::unordered_map<c10::Device, std::vector<int32_t*>> which;
  for (const std::size_t parameter : parameters) {
    const auto found = pairs_.find(parameter);
    if (found == pairs_.end()) continue;
    const at::Tensor& one = found->second.which;
    which[one.device()].push_back(one.mutable_data_ptr<int32_t>());
  }
  for (const auto& [device, pointers] : which) {
    const at::Tensor flag = joined(non_finite, device);
    const int32_t* seen = flag.defined() ? flag.const_data_ptr<int32_t>() : nullptr;
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional(device));
    device_codec(device.type())->commit(pointers, seen, current_stream(device));
  }
}

void Residuals::set(std::size_t parameter, const at::Tensor& current) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Pair& pair = pairs_[parameter];
  pair.both[0] = current.reshape({-1}).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  pair.both[1] = at::zeros_like(pair.both[0]);
  pair.which = at::zeros({1}, pair.both[0].options().dtype(at::kInt));
}

}  // namespace ringdp
