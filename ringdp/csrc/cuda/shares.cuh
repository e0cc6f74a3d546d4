// How a warp reads and writes the elements and codes of a run: a step of 256 elements at a time, of which each lane
// has a share of eight, two quads of neighbours that lie half a group apart. The elements of a group share a scale, so
// the two elements of one byte of an int4 block belong to one lane. All lanes of a warp make the same calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/host_device.h"

namespace ringdp::cuda {

inline constexpr std::size_t kStep = 256;
inline constexpr int kShare = 8;
inline constexpr int kQuad = 4;

// A unit is the codes of one lane that lie side by side: 4 bytes of block codes, 8 of casts.
enum class Access : uint32_t {
  kElements,  // element by element and byte by byte, with an eye on the end of the run
  kPairs,     // floats 16 bytes at a time, codes 2
  kUnits,     // floats 16 bytes at a time, codes a unit
};

inline bool aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <std::size_t kGroup>
__device__ inline std::size_t quad_of(unsigned lane, int which) {
  constexpr unsigned kLanes = kGroup / kShare;
  return lane / kLanes * kGroup + lane % kLanes * kQuad + static_cast<unsigned>(which) * (kGroup / 2);
}

// Where element i of a lane's share lies in its step.
template <std::size_t kGroup>
__device__ inline std::size_t element_of(unsigned lane, int i) {
  return quad_of<kGroup>(lane, i / kQuad) + static_cast<unsigned>(i % kQuad);
}

// The lane's share of the step that begins at element `begin`; 0 beyond `count`.
template <std::size_t kGroup, Access kAccess>
__device__ inline void load_share(float (&share)[kShare], const float* x, std::size_t begin, std::size_t count,
                                  unsigned lane) {
#pragma unroll
  for (int which = 0; which < kShare / kQuad; ++which) {
    const std::size_t at = begin + quad_of<kGroup>(lane, which);
    float* quad = share + which * kQuad;
    if constexpr (kAccess == Access::kElements) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) quad[i] = at + i < count ? x[at + i] : 0.0f;
    } else {
      const float4 loaded = *reinterpret_cast<const float4*>(x + at);
      quad[0] = loaded.x, quad[1] = loaded.y, quad[2] = loaded.z, quad[3] = loaded.w;
    }
  }
}

template <std::size_t kGroup, Access kAccess>
__device__ inline void store_share(float* x, const float (&share)[kShare], std::size_t begin, std::size_t count,
                                   unsigned lane) {
#pragma unroll
  for (int which = 0; which < kShare / kQuad; ++which) {
    const std::size_t at = begin + quad_of<kGroup>(lane, which);
    const float* quad = share + which * kQuad;
    if constexpr (kAccess == Access::kElements) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        if (at + i < count) x[at + i] = quad[i];
    } else {
      // Read again only much later. A plain assignment may be split by the compiler.
      __stcs(reinterpret_cast<float4*>(x + at), make_float4(quad[0], quad[1], quad[2], quad[3]));
    }
  }
}

// The type in which a unit is read and written: the whole unit, or parts.
template <Access kAccess, class Unit>
using UnitPart = std::conditional_t<kAccess == Access::kUnits, Unit,
                                    std::conditional_t<kAccess == Access::kPairs, uint16_t, uint8_t>>;

// The unit at byte `at` of a plane that has `end` bytes; bytes beyond are 0.
template <Access kAccess, class Unit>
__device__ inline Unit load_unit(const std::byte* plane, std::size_t at, std::size_t end) {
  using Part = UnitPart<kAccess, Unit>;
  Unit unit = 0;
#pragma unroll
  for (unsigned i = 0; i < sizeof(Unit); i += sizeof(Part))
    if (kAccess != Access::kElements || at + i < end)
      unit |= static_cast<Unit>(*reinterpret_cast<const Part*>(plane + at + i)) << 8 * i;
  return unit;
}

template <Access kAccess, class Unit>
__device__ inline void store_unit(std::byte* plane, Unit unit, std::size_t at, std::size_t end) {
  using Part = UnitPart<kAccess, Unit>;
#pragma unroll
  for (unsigned i = 0; i < sizeof(Unit); i += sizeof(Part))
    if (kAccess != Access::kElements || at + i < end)
      *reinterpret_cast<Part*>(plane + at + i) = static_cast<Part>(unit >> 8 * i);
}

}  // namespace ringdp::cuda
