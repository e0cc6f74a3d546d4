// InputFactor: by what an all-reduce multiplies this rank's input before it uses it. Each element passes through it once, while
// it is in a cache anyway, which saves the caller a pass over memory. Owned by the operation, used by the driving thread.
#pragma once

#include <cstddef>
#include <span>

#include "base/types.h"
#include "kernels/kernels.h"

namespace ringdp {

class InputFactor {
 public:
  InputFactor() = default;
  // float32 and float64 are multiplied by the factor in that type. Throws Error(kValue) for another type, unless it is 1.
  InputFactor(DType dtype, double factor);

  bool on() const { return factor_ != 1; }
  void apply(std::span<std::byte> input) const {
    if (on()) multiply_(input.data(), factor_, input.size() / element_bytes_);
  }

 private:
  double factor_ = 1;
  std::size_t element_bytes_ = 1;
  Multiply multiply_ = nullptr;
};

}  // namespace ringdp
