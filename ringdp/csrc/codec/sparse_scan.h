// What a sparse code reads of its input: the magnitude above which elements go into it, and, in a pass with the
// residual, which those are. Stateless, any thread; every instruction set gives the same bits.
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
  float decay;
  uint32_t threshold;  // bits of a positive float
};

// v = x + factor·decay·residual for n elements from `at` on, new_residual = v / factor, and a bit of `large` for each v
// whose magnitude is at least the threshold, or that is a NaN. Returns whether there is any.
using ScanBlock = bool (*)(float* v, uint64_t* large, const Scan& scan, std::size_t at, std::size_t n);

ScanBlock scan_block(Isa isa);

// v = x + factor·residual of `count` elements; residual may be null.
struct Looked {
  const float* x;
  const float* residual;
  float factor;
  std::size_t count;
};

// A magnitude that about `wanted` of the v reach, by a histogram of about one in 16 of them; 0 where none is above
// zero. Where magnitudes are too close together for the bins, it is the magnitude of one of the samples.
float estimate_threshold(const Looked& looked, std::size_t wanted);

// The `wanted` largest elements are those above the threshold, and `equals` of those that equal it.
struct Cut {
  float threshold = 0;
  std::size_t equals = 0;
};

// Reads them three times. At least one is wanted, and no more than there are; infinities and NaNs count as the largest.
Cut exact_cut(const Looked& looked, std::size_t wanted);

}  // namespace ringdp::sparse
