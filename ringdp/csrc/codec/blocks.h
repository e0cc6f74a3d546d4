// What the block codes mean, for one block: the definition that every loop applies. Stateless, any thread.
// A block's elements become whole numbers from kLowest to kHighest, and those codes.
//   int8: 256 elements share a float32 scale = absmax / 127; whole = x · (127 / absmax) to nearest, ties to even; a byte each.
//   int4, int5, int6: 64 elements share a bfloat16 scale = extreme / -8, -16, -32 rounded to nearest, where the extreme is the
//         element of the greatest magnitude, of two such the negative one: the scale has a sign so that all 2^bits codes are of
//         use; whole = x · (1 / scale), likewise, 7, 15, 31 at most; code = whole + 8, 16, 32.
//   nf4:  likewise with extreme / -127; code = which of 16 levels is nearest to the whole number.
// decode(code) = whole · scale, one IEEE multiplication. A block whose absmax is below kTiny is scaled up by a power of two
// first, so that the reciprocal is finite, and its whole numbers are clamped, since a subnormal scale is a coarse one. Codes do
// not change when all elements are multiplied by a power of two (unless that leaves the normal range).
// A code is the plane of all scales, then a plane of all codes, or of 4 bits of each of them and one of the others; the last
// block of each may be shorter.
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

// The order of a block's elements whose last one makes the scale: by magnitude, then, where the scale has a sign, negative
// ones last. Infinities and NaNs are behind all others. And back: the element's bits, or its magnitude's.
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

struct Int8Block {
  static constexpr std::size_t kElements = 256;
  static constexpr int kBits = 8;  // the whole numbers are the codes
  static constexpr bool kUniform = true;
  static constexpr bool kSigned = false;  // its scale
  static constexpr float kHighest = 127.0f;
  static constexpr float kLowest = -127.0f;
  using Scale = float;

  static RINGDP_ALWAYS_INLINE Scaling scaling(float absmax) {
    if (absmax == 0.0f || absmax >= kTiny) return plain_scaling(absmax);
    return {absmax / kHighest, kTinyFactor, kHighest / (absmax * kTinyFactor)};
  }
  // Where absmax is 0 or at least kTiny.
  static RINGDP_ALWAYS_INLINE Scaling plain_scaling(float absmax) {
    return {absmax / kHighest, 1.0f, absmax == 0.0f ? 0.0f : kHighest / absmax};
  }
  static RINGDP_ALWAYS_INLINE Scale stored(float scale) { return scale; }
  static RINGDP_ALWAYS_INLINE float loaded(Scale scale) { return scale; }
  static RINGDP_HOST_DEVICE constexpr std::size_t across(int plane) { return plane == 0 ? kElements : 0; }
};

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

// 16 levels in 127ths, denser near zero as NormalFloat's (Dettmers et al., "QLoRA", NeurIPS 2023, arXiv 2305.14314, appendix E),
// but for a scale with a sign: the greatest element of a block has the level at one end to itself. Least squared error (Lloyd,
// IEEE Trans. Information Theory 28, 1982) over blocks of Gaussian numbers and of such times exp(0.5 · another), 0 kept;
// -11, not -10, so that what becomes it is at least half of it, and the residual exact.
struct NormalFloat4Block : NibbleBlock<4, -127, 127> {
  static constexpr bool kUniform = false;
  static constexpr uint8_t kZero = 7;
  static constexpr int8_t kLevels[16] = {-127, -92, -68, -49, -34, -21, -11, 0, 8, 17, 27, 38, 51, 66, 85, 109};

  // The nearest level, the lower one of two as near: by halves, of which all lanes of a vector take the same steps.
  static RINGDP_ALWAYS_INLINE uint8_t code_of(int8_t whole) {
    uint8_t set[kBits];
    set[3] = all_bits(whole > midpoint<3, 3, 0>(set));
    set[2] = all_bits(whole > midpoint<3, 2, 0>(set));
    set[1] = all_bits(whole > midpoint<3, 1, 0>(set));
    set[0] = all_bits(whole > midpoint<3, 0, 0>(set));
    return static_cast<uint8_t>((set[3] & 8) | (set[2] & 4) | (set[1] & 2) | (set[0] & 1));
  }
  static RINGDP_ALWAYS_INLINE uint8_t whole_of(uint8_t code) { return levels_of(code); }

  // Of each byte of a word.
  template <class Word>
  static RINGDP_ALWAYS_INLINE Word levels_of(Word codes) {
    const Word set[kBits] = {bytes_with_bit<0>(codes), bytes_with_bit<1>(codes), bytes_with_bit<2>(codes),
                             bytes_with_bit<3>(codes)};
    return level<3, 0>(set);
  }

 private:
  static RINGDP_ALWAYS_INLINE uint8_t all_bits(bool set) { return static_cast<uint8_t>(-static_cast<int>(set)); }
  template <class Word>
  static RINGDP_ALWAYS_INLINE Word chosen(Word set, Word clear, Word other) {
    return static_cast<Word>(clear ^ (set & (clear ^ other)));
  }

  // The one above which bit kBit of the code is set, given those above it; kFirst: the code so far, kNext: the bit to look at.
  template <int kNext, int kBit, int kFirst>
  static RINGDP_ALWAYS_INLINE int8_t midpoint(const uint8_t (&set)[kBits]) {
    if constexpr (kNext == kBit) {
      constexpr int kLower = kFirst + (1 << kBit) - 1, kBoth = kLevels[kLower] + kLevels[kLower + 1];
      return static_cast<int8_t>(kBoth >> 1);
    } else {
      return static_cast<int8_t>(chosen(set[kNext], static_cast<uint8_t>(midpoint<kNext - 1, kBit, kFirst>(set)),
                                        static_cast<uint8_t>(midpoint<kNext - 1, kBit, kFirst + (1 << kNext)>(set))));
    }
  }

  template <int kNext, int kFirst, class Word>
  static RINGDP_ALWAYS_INLINE Word level(const Word (&set)[kBits]) {
    if constexpr (kNext < 0) {
      constexpr auto kLevel = static_cast<uint8_t>(kLevels[kFirst]);
      return static_cast<Word>(kOnes<Word> * kLevel);
    } else {
      return chosen(set[kNext], level<kNext - 1, kFirst>(set), level<kNext - 1, kFirst + (1 << kNext)>(set));
    }
  }

  template <class Word>
  static constexpr Word kOnes = static_cast<Word>(~Word{0}) / 255;
  template <int kBit, class Word>
  static RINGDP_ALWAYS_INLINE Word bytes_with_bit(Word codes) {
    const auto bits = static_cast<Word>(codes >> kBit & kOnes<Word>);
    return static_cast<Word>(sizeof(Word) == 1 ? 0 - bits : bits * 255u);
  }
};

// The quiet NaN that marks a block with an infinity or a NaN in it.
inline constexpr float kMarked = bits_as<float>(0x7fc00000u);

template <class Block>
RINGDP_HOST_DEVICE constexpr std::size_t block_count(std::size_t count) {
  return (count + Block::kElements - 1) / Block::kElements;
}

// Of a plane of codes: those of the last block as far as its first elements need them.
template <class Block>
RINGDP_HOST_DEVICE constexpr std::size_t plane_bytes(int plane, std::size_t count) {
  const std::size_t rest = count % Block::kElements, most = Block::across(plane);
  return count / Block::kElements * most + (rest < most ? rest : most);
}

template <class Block>
RINGDP_HOST_DEVICE constexpr std::size_t scale_bytes(std::size_t count) {
  return block_count<Block>(count) * sizeof(typename Block::Scale);
}

template <class Block>
RINGDP_HOST_DEVICE constexpr std::size_t encoded_bytes(std::size_t count) {
  return scale_bytes<Block>(count) + plane_bytes<Block>(0, count) + plane_bytes<Block>(1, count);
}

}  // namespace ringdp::codecs
