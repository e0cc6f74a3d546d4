// What the block codes mean, for one block: the definition that every loop applies. Stateless, any thread.
//   int8: 256 elements share a float32 scale = absmax / 127; code = x · (127 / absmax) to nearest, ties to even.
//   int4:  64 elements share a bfloat16 scale = absmax / 7 rounded to nearest; code = x · (1 / scale), likewise; a byte
//          holds the codes, plus 8, of elements i (low nibble) and i + 32 (high nibble).
// decode(code) = code · scale, one IEEE multiplication. A block whose absmax is below kTiny is scaled up by a power of two
// first, so that the reciprocal is finite, and its codes are clamped, since a subnormal scale is a coarse one. Codes do not
// change when all elements are multiplied by a power of two (unless that leaves the normal range).
// A code is the plane of all scales, then the plane of all codes; the last block of either may be shorter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/elements.h"

namespace ringdp::codecs {

using kernels::bfloat_to_float;
using kernels::float_to_bfloat;
using kernels::one_nan;

inline constexpr uint32_t kMagnitude = 0x7fffffffu;
inline constexpr uint32_t kInfinity = 0x7f800000u;
inline constexpr uint32_t kLargeScale = 0x7b800000u;  // 2^120: times any code below it is finite
inline constexpr float kTiny = 0x1p-100f;
inline constexpr uint32_t kTinyBits = bits_as<uint32_t>(kTiny);
inline constexpr float kTinyFactor = 0x1p+60f;

inline constexpr float kRounder = 0x1.8p23f;

// x to nearest, ties to even, plus the block's kOffset, in the low bits: for |x| < 2^22 the sum has no bits below the point.
RINGDP_ALWAYS_INLINE uint32_t rounded(float x, float offset) { return bits_as<uint32_t>(x + (kRounder + offset)); }

// How a block of one absmax is coded: code = nearest((x · before) · inverse). `before` is 1 but for tiny blocks.
struct Scaling {
  float scale;
  float before;
  float inverse;
};

struct Int8Block {
  static constexpr std::size_t kElements = 256;
  static constexpr float kLargest = 127.0f;
  using Scale = float;

  static RINGDP_ALWAYS_INLINE Scaling scaling(float absmax) {
    if (absmax == 0.0f || absmax >= kTiny) return plain_scaling(absmax);
    return {absmax / kLargest, kTinyFactor, kLargest / (absmax * kTinyFactor)};
  }
  // Where absmax is 0 or at least kTiny.
  static RINGDP_ALWAYS_INLINE Scaling plain_scaling(float absmax) {
    return {absmax / kLargest, 1.0f, absmax == 0.0f ? 0.0f : kLargest / absmax};
  }
  static RINGDP_ALWAYS_INLINE Scale stored(float scale) { return scale; }
  static RINGDP_ALWAYS_INLINE float loaded(Scale scale) { return scale; }
  static RINGDP_HOST_DEVICE constexpr std::size_t code_bytes(std::size_t count) { return count; }
};

struct Int4Block {
  static constexpr std::size_t kElements = 64;
  static constexpr std::size_t kHalf = kElements / 2;
  static constexpr float kLargest = 7.0f;
  using Scale = uint16_t;

  static RINGDP_ALWAYS_INLINE Scaling scaling(float absmax) {
    if (absmax == 0.0f || absmax >= kTiny) return plain_scaling(absmax);
    const float scale = loaded(stored(absmax / kLargest));
    if (scale == 0.0f) return {0.0f, 1.0f, 0.0f};
    return {scale, kTinyFactor, 1.0f / (scale * kTinyFactor)};
  }
  static RINGDP_ALWAYS_INLINE Scaling plain_scaling(float absmax) {
    const float scale = loaded(stored(absmax / kLargest));
    return {scale, 1.0f, scale == 0.0f ? 0.0f : 1.0f / scale};
  }
  static RINGDP_ALWAYS_INLINE Scale stored(float scale) { return float_to_bfloat(scale); }
  static RINGDP_ALWAYS_INLINE float loaded(Scale scale) { return bfloat_to_float(scale); }
  // Of the last block's `count` elements: as many bytes as its low nibbles.
  static RINGDP_HOST_DEVICE constexpr std::size_t code_bytes(std::size_t count) {
    const std::size_t rest = count % kElements;
    return count / kElements * kHalf + (rest < kHalf ? rest : kHalf);
  }
};

// The quiet NaN that marks a block with an infinity or a NaN in it.
inline constexpr float kMarked = bits_as<float>(0x7fc00000u);

template <class Block>
RINGDP_HOST_DEVICE constexpr std::size_t block_count(std::size_t count) {
  return (count + Block::kElements - 1) / Block::kElements;
}

template <class Block>
RINGDP_HOST_DEVICE constexpr std::size_t encoded_bytes(std::size_t count) {
  return block_count<Block>(count) * sizeof(typename Block::Scale) + Block::code_bytes(count);
}

}  // namespace ringdp::codecs
