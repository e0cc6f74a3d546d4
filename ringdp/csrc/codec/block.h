// Shared by all block codes: how an element is scaled and rounded, and the order that determines a block's extreme.
// Stateless, any thread.
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

// x to nearest, ties to even, plus the block's kOffset, in the low bits: for |x| < 2^22 the sum has no bits below the
// point.
RINGDP_ALWAYS_INLINE uint32_t rounded(float x, float offset) { return bits_as<uint32_t>(x + (kRounder + offset)); }

// The order of a block's elements whose last one makes the scale: by magnitude, then, where the scale has a sign,
// negative ones last. Infinities and NaNs are behind all others. And back: the element's bits, or its magnitude's.
template <class Block>
RINGDP_ALWAYS_INLINE uint32_t place_of(float x) {
  const auto bits = bits_as<uint32_t>(x);
  return Block::kSigned ? bits << 1 | bits >> 31 : bits & kMagnitude;
}
template <class Block>
RINGDP_ALWAYS_INLINE uint32_t bits_at(uint32_t place) {
  return Block::kSigned ? place >> 1 | place << 31 : place;
}

// How a block is coded: code = nearest((x · before) · inverse). `before` is 1 but for tiny blocks.
struct Scaling {
  float scale;
  float before;
  float inverse;
};

inline constexpr int kPlanes = 2;  // of codes, at most

}  // namespace ringdp::codecs
