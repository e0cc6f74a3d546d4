// The magnitude above which elements go into a sparse code: estimated from a sample, or exact. Stateless, any thread;
// the same on every instruction set.
#pragma once

#include <cstddef>

namespace ringdp::sparse {

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
