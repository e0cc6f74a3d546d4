// The arguments of a compressed all-reduce: sections of a buffer, and how they are coded. See
// docs/reference/algorithms.md and docs/reference/wire_format.md. Value types, any thread; the memory belongs to the
// caller until the Work is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/codec.h"

namespace ringdp {

// One parameter's gradient. Its blocks are counted from its own start, and `count` and `owner_offset` alone say which
// rank owns which part of it, so the bits do not depend on the other sections of the buffer.
struct CompressedSection {
  float* x = nullptr;   // [count]; this rank's gradient, then the mean
  float* to = nullptr;  // [count]; receives the mean, and `x` is not changed; null: `x` receives it
  std::size_t count = 0;
  uint32_t owner_offset = 0;  // the first part that gets one of the remaining units; a hash of the parameter's name
  const float* residual = nullptr;  // [count] of error feedback; null: without
  float* new_residual = nullptr;    // [count]; may not be `residual`
};

struct Compression {
  CodecId codec = CodecId::kInt8;
  float loss_scale = 1.0f;  // a power of two: gradients are that much larger than residuals
  std::size_t divisor = 1;  // of the sum: the number of ranks with input
};

}  // namespace ringdp
