// The blocks of int4, int5 and int6: a bfloat16 scale, and codes in planes of 4 bits and of what is above them
// (blocks.h). Stateless, any thread.
#pragma once

#include "codec/block.h"

namespace ringdp::codecs {

// The low 4 bits of elements i and i + 32 in one byte of the first plane; in the second the others, of elements
// i, i + 8 · kUpperBits, i + 2 · 8 · kUpperBits, … in one byte.
template <int kBitCount, int kLowestWhole, int kHighestWhole>
struct NibbleBlock {
  static constexpr std::size_t kElements = 64;
  static constexpr std::size_t kHalf = kElements / 2;
  static constexpr int kBits = kBitCount;
  static constexpr int kUpperBits = kBits - 4;
  static constexpr uint64_t kUpperOnes = 0x0101010101010101u * ((1u << kUpperBits) - 1);  // those of eight bytes
  static constexpr bool kSigned = true;  // its scale: the extreme becomes kLowest
  static constexpr float kLowest = kLowestWhole;
  static constexpr float kHighest = kHighestWhole;
  using Scale = uint16_t;

  static RINGDP_ALWAYS_INLINE Scaling scaling(float extreme) {
    const uint32_t magnitude = bits_as<uint32_t>(extreme) & kMagnitude;
    if (magnitude == 0 || magnitude >= kTinyBits) return plain_scaling(extreme);
    const float scale = scale_of(extreme);
    if (scale == 0.0f) return {0.0f, 1.0f, 0.0f};
    return {scale, kTinyFactor, 1.0f / (scale * kTinyFactor)};
  }
  static RINGDP_ALWAYS_INLINE Scaling plain_scaling(float extreme) {
    const float scale = scale_of(extreme);
    return {scale, 1.0f, scale == 0.0f ? 0.0f : 1.0f / scale};
  }
  static RINGDP_ALWAYS_INLINE float scale_of(float extreme) {
    return loaded(stored(extreme / kLowest)) + 0.0f;  // 0, not -0
  }
  static RINGDP_ALWAYS_INLINE Scale stored(float scale) { return float_to_bfloat(scale); }
  static RINGDP_ALWAYS_INLINE float loaded(Scale scale) { return bfloat_to_float(scale); }
  // How many bytes of a plane a block has.
  static RINGDP_HOST_DEVICE constexpr std::size_t across(int plane) {
    return plane == 0 ? kHalf : kElements / 8 * kUpperBits;
  }
};

template <int kBitCount>
struct LinearBlock : NibbleBlock<kBitCount, -(1 << (kBitCount - 1)), (1 << (kBitCount - 1)) - 1> {
  static constexpr bool kUniform = true;  // whole_of(code_of(whole)) is whole
  static constexpr uint8_t kZero = 1 << (kBitCount - 1);

  static RINGDP_ALWAYS_INLINE uint8_t code_of(int8_t whole) { return static_cast<uint8_t>(whole + kZero); }
  static RINGDP_ALWAYS_INLINE uint8_t whole_of(uint8_t code) { return static_cast<uint8_t>(code - kZero); }
};

using Int4Block = LinearBlock<4>;
using Int5Block = LinearBlock<5>;
using Int6Block = LinearBlock<6>;

}  // namespace ringdp::codecs
