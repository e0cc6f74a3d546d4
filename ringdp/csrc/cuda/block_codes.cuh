// int8 and int4 on the device: codec/blocks.h applied to a lane's share, with the block's largest element found by shuffles.
#pragma once

#include "codec/blocks.h"
#include "cuda/launch.cuh"
#include "cuda/shares.cuh"

namespace ringdp::cuda {

// The low bytes of four words as one.
__device__ inline uint32_t packed_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Byte i of `word`, less `zero`, as a float: beside the exponent of 2^23 it is the float's last bits.
__device__ inline float float_of_byte(uint32_t word, int i, float zero) {
  return bits_as<float>(0x4b000000u | (word >> 8 * i & 0xffu)) - (0x1p23f + zero);
}

// Codes of eight elements in units of four bytes: packed from sums that have them in their low bits.
struct Int8Packing {
  static constexpr int kUnits = 2;
  static constexpr uint32_t kZeros = 0;
  static constexpr float kOffset = 0.0f;

  static __device__ std::size_t unit_of(unsigned lane, int unit) {
    return quad_of<codecs::Int8Block::kElements>(lane, unit);
  }
  static __device__ void pack(uint32_t (&units)[kUnits], const uint32_t (&sums)[kShare]) {
    units[0] = packed_bytes(sums[0], sums[1], sums[2], sums[3]);
    units[1] = packed_bytes(sums[4], sums[5], sums[6], sums[7]);
  }
  static __device__ void unpack(float (&values)[kShare], const uint32_t (&units)[kUnits]) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) values[i] = float_of_byte(units[i / kQuad] ^ 0x80808080u, i % kQuad, 128.0f);
  }
};

struct Int4Packing {
  static constexpr int kUnits = 1;
  static constexpr uint32_t kZeros = 0x88888888u;
  static constexpr float kOffset = 8.0f;

  static __device__ std::size_t unit_of(unsigned lane, int) { return lane * sizeof(uint32_t); }
  static __device__ void pack(uint32_t (&units)[kUnits], const uint32_t (&sums)[kShare]) {
    uint32_t bytes[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) bytes[i] = (sums[i] & 15u) | sums[i + kQuad] << 4;
    units[0] = packed_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
  }
  static __device__ void unpack(float (&values)[kShare], const uint32_t (&units)[kUnits]) {
    const uint32_t low = units[0] & 0x0f0f0f0fu, high = units[0] >> 4 & 0x0f0f0f0fu;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      values[i] = float_of_byte(low, i, 8.0f);
      values[i + kQuad] = float_of_byte(high, i, 8.0f);
    }
  }
};

template <class Block, class Packing>
struct BlockCodes {
  using Unit = uint32_t;
  using Scale = typename Block::Scale;
  using ScaleBits = std::conditional_t<sizeof(Scale) == 4, uint32_t, uint16_t>;
  static constexpr std::size_t kGroup = Block::kElements;
  static constexpr unsigned kLanes = kGroup / kShare;

  struct Code {
    Unit units[Packing::kUnits];
    float scale;
  };

  // Where the plane of codes begins.
  static RINGDP_HOST_DEVICE std::size_t plane(std::size_t count) {
    return codecs::block_count<Block>(count) * sizeof(Scale);
  }

  // A plane of codes that is aligned to its units has aligned scales in front of it.
  template <Access kAccess>
  static __device__ Code load(const std::byte* code, std::size_t begin, std::size_t count, unsigned lane) {
    Code loaded;
    const std::size_t block = begin / kGroup + lane / kLanes, end = plane(count);
    loaded.scale = Block::loaded(bits_as<Scale>(load_unit<kAccess, ScaleBits>(code, block * sizeof(Scale), end)));
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i)
      loaded.units[i] = load_unit<kAccess, Unit>(code + end, Block::code_bytes(begin) + Packing::unit_of(lane, i),
                                                 Block::code_bytes(count));
    return loaded;
  }

  template <Access kAccess>
  static __device__ void store(std::byte* code, const Code& it, std::size_t begin, std::size_t count, unsigned lane) {
    const std::size_t block = begin / kGroup + lane / kLanes, end = plane(count);
    if (lane % kLanes == 0)
      store_unit<kAccess, ScaleBits>(code, bits_as<ScaleBits>(Block::stored(it.scale)), block * sizeof(Scale), end);
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i)
      store_unit<kAccess, Unit>(code + end, it.units[i], Block::code_bytes(begin) + Packing::unit_of(lane, i),
                                Block::code_bytes(count));
  }

  // Codes a share. All lanes.
  static __device__ Code encode(const float (&v)[kShare]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) largest = max(largest, bits_as<uint32_t>(v[i]) & codecs::kMagnitude);
#pragma unroll
    for (unsigned apart = kLanes / 2; apart > 0; apart /= 2)
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, apart));
    const bool finite = largest < codecs::kInfinity;
    const codecs::Scaling by = Block::scaling(finite ? bits_as<float>(largest) : 0.0f);
    uint32_t sums[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const float y = (v[i] * by.before) * by.inverse;
      sums[i] = codecs::rounded(fminf(fmaxf(y, -Block::kLargest), Block::kLargest), Packing::kOffset);
    }
    Code code;
    Packing::pack(code.units, sums);
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i) code.units[i] = finite ? code.units[i] : Packing::kZeros;
    code.scale = finite ? Block::loaded(Block::stored(by.scale)) : codecs::kMarked;
    return code;
  }

  static __device__ void decode(float (&values)[kShare], const Code& code) {
    Packing::unpack(values, code.units);
#pragma unroll
    for (int i = 0; i < kShare; ++i) values[i] = values[i] * code.scale;
  }

  // decode, where the bits of a NaN matter: the CPU's product with kMarked is kMarked, the device's is another NaN.
  static __device__ void decode_marked(float (&values)[kShare], const Code& code) {
    decode(values, code);
#pragma unroll
    for (int i = 0; i < kShare; ++i) values[i] = code.scale != code.scale ? codecs::kMarked : values[i];
  }

  // Whether what was encoded was finite: element i of the share, or any of it.
  static __device__ bool finite(const Code& code, int) { return code.scale == code.scale; }
  static __device__ bool finite(const Code& code) { return code.scale == code.scale; }

  // Whether the code's elements in [begin, count) decode to something finite.
  static __device__ bool decodes_finite(const Code& code, const float (&values)[kShare], std::size_t begin,
                                        std::size_t count, unsigned lane) {
    if ((bits_as<uint32_t>(code.scale) & codecs::kMagnitude) < codecs::kLargeScale) return true;
    bool finite = true;
    for (int i = 0; i < kShare; ++i)
      if (begin + element_of<kGroup>(lane, i) < count)
        finite &= (bits_as<uint32_t>(values[i]) & codecs::kMagnitude) < codecs::kInfinity;
    return finite;
  }
};

using Int8Codes = BlockCodes<codecs::Int8Block, Int8Packing>;
using Int4Codes = BlockCodes<codecs::Int4Block, Int4Packing>;

}  // namespace ringdp::cuda
