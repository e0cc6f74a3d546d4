// Tensors whose memory loops of the core may run over. Any thread; tensors are only looked at.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/error.h"

namespace ringdp {

// Throws Error(kValue) that begins with `name` for a tensor that is not of this type, contiguous and on the CPU.
inline void require_flat(const at::Tensor& tensor, at::ScalarType type, const std::string& name) {
  if (tensor.scalar_type() == type && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
      !tensor.is_conj() && !tensor.is_neg())
    return;
  throw Error(ErrorKind::kValue, name + " is " + c10::str(tensor.scalar_type()) + " on " + c10::str(tensor.device()) +
                                     (tensor.is_contiguous() ? "" : ", not contiguous") + "; it must be " +
                                     c10::str(type) + ", contiguous, on the CPU");
}

}  // namespace ringdp
