// One flat array, read 16 bytes at a time between a head and a tail that are not aligned to that. Device code,
// called by all threads of a block.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/launch.cuh"

namespace ringdp::cuda {

inline constexpr int kVectors = 4;  // of one thread, read before the first is used
inline constexpr std::size_t kVectorTile = kThreads * kVectors;

struct Flat {
  std::size_t head;  // elements before the first aligned vector
  std::size_t vectors;
  std::size_t count;  // elements in all

  std::size_t tiles() const { return std::max<std::size_t>(tiles_of(vectors, kVectorTile), count > 0 ? 1 : 0); }
};

inline Flat flat(const void* begin, std::size_t count, std::size_t element_bytes) {
  const std::size_t misaligned = reinterpret_cast<uintptr_t>(begin) % sizeof(uint4);
  const std::size_t head = std::min(count, (sizeof(uint4) - misaligned) % sizeof(uint4) / element_bytes);
  return {head, (count - head) * element_bytes / sizeof(uint4), count};
}

// Calls body with all elements in the vectors of this block of threads, as Packed (one element or several), and with
// each element before and after the vectors.
template <class Packed, class Element, class Body>
__device__ inline void for_flat(const Element* begin, const Flat& flat, Body&& body) {
  constexpr unsigned kElements = sizeof(uint4) / sizeof(Element);
  struct alignas(sizeof(uint4)) Vector {
    Packed values[sizeof(uint4) / sizeof(Packed)];
  };
  const auto* vectors = reinterpret_cast<const Vector*>(begin + flat.head);
  const std::size_t at = static_cast<std::size_t>(blockIdx.x) * kVectorTile + threadIdx.x;
  Vector loaded[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    if (at + i * kThreads < flat.vectors) loaded[i] = vectors[at + i * kThreads];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (at + i * kThreads >= flat.vectors) continue;
#pragma unroll
    for (const Packed& value : loaded[i].values) body(value);
  }
  if (blockIdx.x != 0) return;
  const std::size_t after = flat.head + flat.vectors * kElements;
  const std::size_t one = threadIdx.x < flat.head ? threadIdx.x : after + (threadIdx.x - flat.head);
  if (one < flat.count) body(begin[one]);
}

}  // namespace ringdp::cuda
