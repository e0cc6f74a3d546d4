// The block codes on the device: codec/blocks.h applied to a lane's share, with the block's largest element found by
// shuffles.
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

// Codes of a lane's eight elements in units of four bytes: packed from sums that have whole numbers, plus kOffset, in
// their low bits.
struct Int8Packing {
  static constexpr int kUnits = 2;
  static constexpr float kOffset = 0.0f;

  static __device__ constexpr uint32_t zeros(int) { return 0; }
  static __device__ void pack(uint32_t (&units)[kUnits], const uint32_t (&sums)[kShare]) {
    units[0] = packed_bytes(sums[0], sums[1], sums[2], sums[3]);
    units[1] = packed_bytes(sums[4], sums[5], sums[6], sums[7]);
  }
  static __device__ void unpack(float (&values)[kShare], const uint32_t (&units)[kUnits]) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) values[i] = float_of_byte(units[i / kQuad] ^ 0x80808080u, i % kQuad, 128.0f);
  }

  // Where a unit is: its plane, and the byte there in the step.
  static __device__ constexpr int plane_of(int) { return 0; }
  static __device__ std::size_t byte_of(unsigned lane, int unit) {
    return quad_of<codecs::Int8Block::kElements>(lane, unit);
  }
  // Between the lane's unit and the plane's.
  static __device__ uint32_t to_plane(int, uint32_t unit, unsigned) { return unit; }
  static __device__ uint32_t from_plane(int, uint32_t unit, unsigned) { return unit; }
  static __device__ bool stores(int, unsigned) { return true; }
};

// Unit 0 has the low 4 bits of elements i and i + 4 of the share in byte i, unit 1 the upper ones in the same places.
// A unit of the upper plane belongs to all the lanes whose elements lie across it, and has theirs side by side.
template <class Block>
struct NibblePacking {
  static constexpr unsigned kUpperBits = Block::kUpperBits;
  static constexpr unsigned kLanes = Block::kElements / kShare;
  static constexpr unsigned kAcross = 2 * kUpperBits;  // units of the upper plane that a block has
  static constexpr int kUnits = kUpperBits > 0 ? 2 : 1;
  static constexpr float kOffset = Block::kUniform ? Block::kZero : 0.0f;

  static __device__ constexpr uint32_t zeros(int unit) {
    return 0x11111111u * (unit == 0 ? Block::kZero & 15u : Block::kZero >> 4);
  }
  static __device__ void pack(uint32_t (&units)[kUnits], const uint32_t (&sums)[kShare]) {
    uint32_t codes[kShare], lower[kQuad], upper[kQuad];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if constexpr (Block::kUniform)
        codes[i] = sums[i] & ((1u << Block::kBits) - 1);
      else
        codes[i] = Block::code_of(static_cast<int8_t>(sums[i]));
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      lower[i] = (codes[i] & 15u) | codes[i + kQuad] << 4;
      upper[i] = codes[i] >> 4 | (codes[i + kQuad] & ~15u);
    }
    units[0] = packed_bytes(lower[0], lower[1], lower[2], lower[3]);
    if constexpr (kUnits > 1) units[1] = packed_bytes(upper[0], upper[1], upper[2], upper[3]);
  }
  static __device__ void unpack(float (&values)[kShare], const uint32_t (&units)[kUnits]) {
    uint32_t codes[2] = {units[0] & 0x0f0f0f0fu, units[0] >> 4 & 0x0f0f0f0fu};
    if constexpr (kUnits > 1) {
      constexpr uint32_t kMask = 0x10101010u * ((1u << kUpperBits) - 1);
      codes[0] |= units[1] << 4 & kMask;
      codes[1] |= units[1] & kMask;
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if constexpr (Block::kUniform)
        values[i] = float_of_byte(codes[i / kQuad], i % kQuad, Block::kZero);
      else
        values[i] = float_of_byte(Block::levels_of(codes[i / kQuad]) ^ 0x80808080u, i % kQuad, 128.0f);
    }
  }

  static __device__ constexpr int plane_of(int unit) { return unit; }
  static __device__ std::size_t byte_of(unsigned lane, int unit) {
    if constexpr (kUnits > 1)
      if (unit == 1) return (lane / kLanes * kAcross + lane % kAcross) * sizeof(uint32_t);
    return lane * sizeof(uint32_t);
  }
  // All lanes.
  static __device__ uint32_t to_plane(int unit, uint32_t mine, unsigned lane) {
    if constexpr (kUnits > 1) {
      if (unit == 0) return mine;
      uint32_t all = mine << shift_of(lane);
#pragma unroll
      for (unsigned apart = kAcross; apart < kLanes; apart *= 2) all |= __shfl_xor_sync(kAllLanes, all, apart);
      return all;
    }
    return mine;
  }
  static __device__ uint32_t from_plane(int unit, uint32_t all, unsigned lane) {
    if constexpr (kUnits > 1) return unit == 0 ? all : all >> shift_of(lane);
    return all;
  }
  static __device__ bool stores(int unit, unsigned lane) {
    if constexpr (kUnits > 1) return unit == 0 || lane % kLanes < kAcross;
    return true;
  }

 private:
  static __device__ unsigned shift_of(unsigned lane) { return lane % kLanes / kAcross * kUpperBits; }
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

  static constexpr int kPlanes = Packing::kUnits > 1 && Packing::plane_of(1) > 0 ? 2 : 1;

  // Where a plane of codes begins.
  static RINGDP_HOST_DEVICE std::size_t plane(int which, std::size_t count) {
    return codecs::scale_bytes<Block>(count) + (which == 0 ? 0 : codecs::plane_bytes<Block>(0, count));
  }

  // A plane of codes that is aligned to its units has aligned scales in front of it.
  template <Access kAccess>
  static __device__ Code load(const std::byte* code, std::size_t begin, std::size_t count, unsigned lane) {
    Code loaded;
    const std::size_t block = begin / kGroup + lane / kLanes;
    loaded.scale =
        Block::loaded(bits_as<Scale>(load_unit<kAccess, ScaleBits>(code, block * sizeof(Scale), plane(0, count))));
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i) {
      const int which = Packing::plane_of(i);
      const uint32_t unit = load_unit<kAccess, Unit>(code + plane(which, count), place(i, begin, lane),
                                                     codecs::plane_bytes<Block>(which, count));
      loaded.units[i] = Packing::from_plane(i, unit, lane);
    }
    return loaded;
  }

  // All lanes.
  template <Access kAccess>
  static __device__ void store(std::byte* code, const Code& it, std::size_t begin, std::size_t count, unsigned lane) {
    const std::size_t block = begin / kGroup + lane / kLanes;
    if (lane % kLanes == 0)
      store_unit<kAccess, ScaleBits>(code, bits_as<ScaleBits>(Block::stored(it.scale)), block * sizeof(Scale),
                                     plane(0, count));
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i) {
      const int which = Packing::plane_of(i);
      const uint32_t unit = Packing::to_plane(i, it.units[i], lane);
      if (Packing::stores(i, lane))
        store_unit<kAccess, Unit>(code + plane(which, count), unit, place(i, begin, lane),
                                  codecs::plane_bytes<Block>(which, count));
    }
  }

  // Codes a share. All lanes.
  static __device__ Code encode(const float (&v)[kShare]) {
    uint32_t last = 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) last = max(last, codecs::place_of<Block>(v[i]));
#pragma unroll
    for (unsigned apart = kLanes / 2; apart > 0; apart /= 2) last = max(last, __shfl_xor_sync(kAllLanes, last, apart));
    const uint32_t extreme = codecs::bits_at<Block>(last);
    const bool finite = (extreme & codecs::kMagnitude) < codecs::kInfinity;
    const codecs::Scaling by = Block::scaling(finite ? bits_as<float>(extreme) : 0.0f);
    uint32_t sums[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const float y = (v[i] * by.before) * by.inverse;
      sums[i] = codecs::rounded(fminf(fmaxf(y, Block::kLowest), Block::kHighest), Packing::kOffset);
    }
    Code code;
    Packing::pack(code.units, sums);
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i) code.units[i] = finite ? code.units[i] : Packing::zeros(i);
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

  // Whether element i of the share, or the whole share, was finite before encoding.
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

 private:
  // Of a unit, in its plane.
  static __device__ std::size_t place(int unit, std::size_t begin, unsigned lane) {
    return codecs::plane_bytes<Block>(Packing::plane_of(unit), begin) + Packing::byte_of(lane, unit);
  }
};

// How a block's codes are packed: in nibbles, unless it says otherwise here.
template <class Block>
struct PackingOf {
  using Type = NibblePacking<Block>;
};
template <>
struct PackingOf<codecs::Int8Block> {
  using Type = Int8Packing;
};
template <class Block>
using BlockCodesOf = BlockCodes<Block, typename PackingOf<Block>::Type>;

}  // namespace ringdp::cuda
