#include "torch/residuals.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>

#include <utility>

namespace ringdp {

const Residuals::Pair& Residuals::of(std::size_t parameter, int64_t numel) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Pair& pair = pairs_[parameter];
  const auto fits = [numel](const at::Tensor& tensor) { return tensor.defined() && tensor.numel() == numel; };
  if (!fits(pair.current)) pair.current = at::zeros({numel}, at::kFloat);
  if (!fits(pair.next)) pair.next = at::zeros({numel}, at::kFloat);
  return pair;
}

void Residuals::commit(std::size_t parameter) {
  const auto found = pairs_.find(parameter);
  if (found != pairs_.end()) std::swap(found->second.current, found->second.next);
}

void Residuals::set(std::size_t parameter, const at::Tensor& current) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  pairs_[parameter] = {current.reshape({-1}).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous(), {}};
}

}  // namespace ringdp
