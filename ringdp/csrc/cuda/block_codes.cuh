// The block codes on the device: codec/blocks.h applied to a lane's share, with the block's largest element found by
// shuffles.
#pragma once

#include "codec/blocks.h"
#include "cuda/launch.cuh"
#include "cuda/levels.cuh"
#include "cuda/shares.cuh"

namespace ringdp::cuda {

// Byte kByte of four words as one.
template <unsigned kByte = 0>
__device__ inline uint32_t packed_bytes(const uint32_t* four) {
  constexpr unsigned kTwo = 0x0040u + 0x11u * kByte;
  return __byte_perm(__byte_perm(four[0], four[1], kTwo), __byte_perm(four[2], four[3], kTwo), 0x5410);
}

// Byte i of `word`, less `zero`, as a float: below the upper byte of 2^23 it is the float's last bits.
__device__ inline float float_of_byte(uint32_t word, int i, float zero) {
  return bits_as<float>(__byte_perm(word, 0x4b000000u, 0x7440u | static_cast<unsigned>(i))) - (0x1p23f + zero);
}

// Codes of a lane's eight elements in units of four bytes: packed from sums that have whole numbers, plus kOffset, in
// their low bits.
struct Int8Packing {
  static constexpr int kUnits = 2;
  static constexpr float kOffset = 0.0f;

  static __device__ constexpr uint32_t zeros(int) { return 0; }
  static __device__ void pack(uint32_t (&units)[kUnits], const uint32_t (&sums)[kShare], unsigned) {
    units[0] = packed_bytes(sums);
    units[1] = packed_bytes(sums + kQuad);
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
  static constexpr float kOffset = Block::kUniform ? Block::kZero : kByteZero;

  static __device__ constexpr uint32_t zeros(int unit) {
    return 0x11111111u * (unit == 0 ? Block::kZero & 15u : Block::kZero >> 4);
  }
  // All lanes.
  static __device__ void pack(uint32_t (&units)[kUnits], const uint32_t (&sums)[kShare], unsigned lane) {
    constexpr uint32_t kLow = 0x0f0f0f0fu;
    uint32_t first, second;
    if constexpr (Block::kUniform) {
      first = packed_bytes(sums), second = packed_bytes(sums + kQuad);
    } else {
      const uint32_t mine = level_entry<Block>(lane);
      uint32_t coded[kShare];
#pragma unroll
      for (int i = 0; i < kShare; ++i) coded[i] = with_code<Block>(sums[i], mine);
      first = packed_bytes<1>(coded), second = packed_bytes<1>(coded + kQuad);
    }
    units[0] = (first & kLow) | (second << 4 & ~kLow);
    if constexpr (kUnits > 1) units[1] = (first >> 4 & kLow) | (second & ~kLow);
  }
  static __device__ void unpack(float (&values)[kShare], const uint32_t (&units)[kUnits]) {
    if constexpr (Block::kUniform) {
      uint32_t codes[2] = {units[0] & 0x0f0f0f0fu, units[0] >> 4 & 0x0f0f0f0fu};
      if constexpr (kUnits > 1) {
        constexpr uint32_t kMask = 0x10101010u * ((1u << kUpperBits) - 1);
        codes[0] |= units[1] << 4 & kMask;
        codes[1] |= units[1] & kMask;
      }
#pragma unroll
      for (int i = 0; i < kShare; ++i) values[i] = float_of_byte(codes[i / kQuad], i % kQuad, Block::kZero);
    } else {
      // Elements 0, 4, 1, 5 of the share, and 2, 6, 3, 7: as their codes lie in the unit.
      const uint32_t levels[2] = {four_levels<Block>(units[0]), four_levels<Block>(units[0] >> 16)};
#pragma unroll
      for (int i = 0; i < kShare; ++i)
        values[i] = float_of_byte(levels[i % kQuad / 2], i % 2 * 2 + i / kQuad, kByteZero);
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
  // As read: what is in it waits for memory when it is taken, not before.
  struct Loaded {
    Unit units[Packing::kUnits];
    ScaleBits scale;
  };

  static constexpr bool kKeepsNans = false;  // whether a NaN's bits are part of the code
  static constexpr int kPlanes = Packing::kUnits > 1 && Packing::plane_of(1) > 0 ? 2 : 1;

  // Where a plane of codes begins.
  static RINGDP_HOST_DEVICE std::size_t plane(int which, std::size_t count) {
    return codecs::scale_bytes<Block>(count) + (which == 0 ? 0 : codecs::plane_bytes<Block>(0, count));
  }

  // Of step `step` from element `begin` on. A plane of codes that is aligned to its units has aligned scales in front
  // of it.
  template <Access kAccess>
  static __device__ Loaded load(const std::byte* code, std::size_t begin, int step, std::size_t count, unsigned lane) {
    Loaded loaded;
    loaded.scale = load_unit<kAccess, ScaleBits>(code, scale_place(begin, step, lane), plane(0, count));
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i) {
      const int which = Packing::plane_of(i);
      loaded.units[i] = load_unit<kAccess, Unit>(code + plane(which, count), place(i, begin, step, lane),
                                                 codecs::plane_bytes<Block>(which, count));
    }
    return loaded;
  }
  static __device__ Code taken(const Loaded& loaded, unsigned lane) {
    Code code;
    code.scale = Block::loaded(bits_as<Scale>(loaded.scale));
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i) code.units[i] = Packing::from_plane(i, loaded.units[i], lane);
    return code;
  }

  // All lanes.
  template <Access kAccess>
  static __device__ void store(std::byte* code, const Code& it, std::size_t begin, int step, std::size_t count,
                               unsigned lane) {
    // The scale is one that was rounded: what is stored are the float's upper bits.
    const auto scale = static_cast<ScaleBits>(bits_as<uint32_t>(it.scale) >> 8 * (sizeof(float) - sizeof(Scale)));
    if (lane % kLanes == 0)
      store_unit<kAccess, ScaleBits>(code, scale, scale_place(begin, step, lane), plane(0, count));
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i) {
      const int which = Packing::plane_of(i);
      const uint32_t unit = Packing::to_plane(i, it.units[i], lane);
      if (Packing::stores(i, lane))
        store_unit<kAccess, Unit>(code + plane(which, count), unit, place(i, begin, step, lane),
                                  codecs::plane_bytes<Block>(which, count));
    }
  }

  // Codes a share. All lanes.
  static __device__ Code encode(const float (&v)[kShare], unsigned lane) {
    uint32_t last = 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) last = max(last, codecs::place_of<Block>(v[i]));
#pragma unroll
    for (unsigned apart = kLanes / 2; apart > 0; apart /= 2) last = max(last, __shfl_xor_sync(kAllLanes, last, apart));
    const uint32_t extreme = codecs::bits_at<Block>(last);
    const bool finite = (extreme & codecs::kMagnitude) < codecs::kInfinity;
    const codecs::Scaling by = Block::scaling(finite ? bits_as<float>(extreme) : 0.0f);
    // Rounded, no element is beyond ±kLowest, but where the block is tiny.
    constexpr bool kOneLess = Block::kHighest < -Block::kLowest;
    float y[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      y[i] = v[i] * by.inverse;
      if constexpr (kOneLess) y[i] = fminf(y[i], Block::kHighest);
    }
    if (by.before != 1.0f)
#pragma unroll
      for (int i = 0; i < kShare; ++i)
        y[i] = fminf(fmaxf((v[i] * by.before) * by.inverse, Block::kLowest), Block::kHighest);
    uint32_t sums[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) sums[i] = codecs::rounded(y[i], Packing::kOffset);
    Code code;
    Packing::pack(code.units, sums, lane);
#pragma unroll
    for (int i = 0; i < Packing::kUnits; ++i) code.units[i] = finite ? code.units[i] : Packing::zeros(i);
    code.scale = finite ? by.scale : codecs::kMarked;
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
  // Of a unit, in its plane, and of the block's scale in its own. A step has whole blocks.
  static __device__ std::size_t place(int unit, std::size_t begin, int step, unsigned lane) {
    constexpr auto kBlocks = static_cast<int>(kStep / kGroup);
    const std::size_t across = Block::across(Packing::plane_of(unit));
    return begin / kGroup * across + Packing::byte_of(lane, unit) + static_cast<std::size_t>(step * kBlocks) * across;
  }
  static __device__ std::size_t scale_place(std::size_t begin, int step, unsigned lane) {
    constexpr auto kBlocks = static_cast<int>(kStep / kGroup);
    return (begin / kGroup + lane / kLanes + static_cast<std::size_t>(step * kBlocks)) * sizeof(Scale);
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
