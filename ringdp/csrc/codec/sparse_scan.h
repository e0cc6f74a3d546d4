// The first pass of a sparse code: adds the residual to a block's elements, and marks the large ones. Stateless, any
// thread; every instruction set gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace ringdp::sparse {

inline constexpr std::size_t kScanned = 256;  // at most

struct Scan {
  const float* x;
  const float* residual;  // may be null: without feedback
  float* new_residual;
  float factor;
  uint32_t threshold;  // bits of a positive float
};

// v = x + factor·residual for n elements from `at` on, new_residual = v / factor, and a bit of `large` for each v whose
// magnitude is at least the threshold, or that is a NaN. Returns whether there is any.
using ScanBlock = bool (*)(float* v, uint64_t* large, const Scan& scan, std::size_t at, std::size_t n);

ScanBlock scan_block(Isa isa);

}  // namespace ringdp::sparse
