// The definition of the block codes, for one block, that every loop applies. Stateless, any thread. A block's elements
// become whole numbers from kLowest to kHighest, and those codes.
//   int8: 256 elements share a float32 scale = absmax / 127; whole = x · (127 / absmax) to nearest, ties to even; a
//     byte each.
//   int4, int5, int6: 64 elements share a bfloat16 scale = extreme / -8, -16, -32 rounded to nearest, where the
//         extreme is the element of the greatest magnitude, of two such the negative one: the scale has a sign so that
//         all 2^bits codes are of use; whole = x · (1 / scale), likewise, 7, 15, 31 at most; code = whole + 8, 16, 32.
//   nf4:  likewise with extreme / -127; code = which of 16 levels is nearest to the whole number.
// decode(code) = whole · scale, one IEEE multiplication. A block whose absmax is below kTiny is scaled up by a power
// of two first, so that the reciprocal is finite, and its whole numbers are clamped, since a subnormal scale is a
// coarse one. Codes do not change when all elements are multiplied by a power of two (unless that leaves the normal
// range). A code is the plane of all scales, then a plane of all codes, or of 4 bits of each of them and one of the
// others; the last block of each may be shorter. To add one: a file with its block, included here, and a row in
// base/codecs.def.
#pragma once

#include "codec/block.h"
#include "codec/codec.h"
#include "codec/int8_block.h"
#include "codec/nf4_block.h"
#include "codec/nibble_block.h"

namespace ringdp::codecs {

// The quiet NaN that marks a block with an infinity or a NaN in it.
inline constexpr float kMarked = bits_as<float>(0x7fc00000u);

template <class Block>
RINGDP_HOST_DEVICE constexpr std::size_t block_count(std::size_t count) {
  return (count + Block::kElements - 1) / Block::kElements;
}

// Bytes of a plane of codes; of the last block only those that its elements need.
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

template <class Block>
constexpr CodecSpec spec_of() {
  CodecSpec spec{.bits = Block::kBits,
                 .scale_bytes = sizeof(typename Block::Scale),
                 .lowest = static_cast<int>(Block::kLowest),
                 .highest = static_cast<int>(Block::kHighest)};
  if constexpr (requires { Block::kLevels; }) spec.levels = Block::kLevels;
  return spec;
}

}  // namespace ringdp::codecs
