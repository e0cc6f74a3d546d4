// Compressed all-reduce: what it is asked for. See docs/algorithms.md and docs/wire_format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/codec.h"

namespace ringdp {

// One parameter's gradient. Its blocks are counted from its own start, and which rank owns which part of it follows from
// `count` and `turn` alone: so the bits do not depend on what else is in the buffer.
struct CompressedSection {
  float* x = nullptr;  // [count]; this rank's gradient, then the mean
  std::size_t count = 0;
  uint32_t turn = 0;                // which parts get the units that are left over; a hash of the parameter's name
  const float* residual = nullptr;  // [count] of error feedback; null: without
  float* new_residual = nullptr;    // [count]; may not be `residual`
};

struct Compression {
  CodecId codec = CodecId::kInt8;
  float factor = 1.0f;      // a power of two: gradients are that much larger than residuals (the loss scale)
  std::size_t divisor = 1;  // of the sum: how many ranks have input
};

}  // namespace ringdp
