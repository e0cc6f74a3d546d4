// From a CodecId to the type that codes, and how far its runs allow wide accesses. Host code.
#pragma once

#include <initializer_list>

#include "cuda/block_codes.cuh"
#include "cuda/cast_codes.cuh"

namespace ringdp::cuda {

// Calls body(CastCodes<…> or BlockCodesOf<…>).
template <class Body>
void with_codes(CodecId codec, Body&& body) {
  switch (codec) {
#define RINGDP_CAST_CODEC(codec, name) \
  case CodecId::k##codec:              \
    return body(CastCodes<codec>{});
#define RINGDP_BLOCK_CODEC(codec, name) \
  case CodecId::k##codec:               \
    return body(BlockCodesOf<codecs::codec##Block>{});
#include "base/codecs.def"
  }
  throw Error(ErrorKind::kValue, "there is no codec number " + std::to_string(static_cast<int>(codec)));
}

// What the steps of a run allow whose elements and codes begin there. Null pointers are aligned.
template <class Codes>
Access access_of(std::initializer_list<const float*> elements, std::initializer_list<const std::byte*> codes,
                 std::size_t count) {
  for (const float* it : elements)
    if (!aligned(it, sizeof(float4))) return Access::kElements;
  Access access = Access::kUnits;
  for (const std::byte* code : codes)
    for (int plane = 0; plane < Codes::kPlanes; ++plane) {
      const std::byte* begin = code + Codes::plane(plane, count);
      if (!aligned(begin, sizeof(uint16_t))) return Access::kElements;
      if (!aligned(begin, sizeof(typename Codes::Unit))) access = Access::kPairs;
    }
  return access;
}

// The part of a run that one warp takes in a kernel whose warps take kSteps steps each, or the last of it.
struct WarpPart {
  std::size_t begin;
  unsigned lane;
  bool whole;
};

template <int kSteps>
__device__ inline WarpPart warp_part(uint32_t tile_in_run, std::size_t count) {
  const std::size_t begin = (static_cast<std::size_t>(tile_in_run) * kWarps + threadIdx.x / kWarp) * (kSteps * kStep);
  return {begin, threadIdx.x % kWarp, begin + kSteps * kStep <= count};
}

template <int kSteps>
inline constexpr std::size_t kTile = kWarps * kSteps * kStep;

// Calls body<access, steps>(begin) for the steps of a warp's part: all at once, or, at the end of a run or where it is
// not aligned, one by one.
template <int kSteps, class Body>
__device__ inline void for_steps(const WarpPart& part, std::size_t count, Access access, Body&& body) {
  if (part.whole && access == Access::kUnits) {
    body.template operator()<Access::kUnits, kSteps>(part.begin);
  } else if (part.whole && access == Access::kPairs) {
    body.template operator()<Access::kPairs, kSteps>(part.begin);
  } else {
    const std::size_t end = part.begin + kSteps * kStep;
#pragma unroll 1
    for (std::size_t begin = part.begin; begin < end && begin < count; begin += kStep)
      body.template operator()<Access::kElements, 1>(begin);
  }
}

}  // namespace ringdp::cuda
