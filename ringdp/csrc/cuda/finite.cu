// find_non_finite: one read, by the bits of the exponents.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/halves.cuh"
#include "cuda/launch.cuh"

namespace ringdp::cuda {
namespace {

// One flat array, read 16 bytes at a time between a head and a tail that are not aligned to that.
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

// The element types of gradients.
template <class T>
struct Number {
  using Bits = typename kernels::Exponent<T>::Bits;
  using Packed = std::conditional_t<sizeof(Bits) == 2, uint32_t, Bits>;  // tested at once

  template <class Some>
  static __device__ bool finite(Some bits) {
    if constexpr (sizeof(Some) > sizeof(Bits))
      return non_finite_pair<T>(bits) == 0;
    else
      return (kernels::carry_of_non_finite<T>(bits) & kernels::kSignBit<T>) == 0;
  }
};

// Calls body(Number<T>{}). Throws Error(kValue) for a type that is not a floating-point type.
template <class Body>
void with_numbers(DType dtype, const char* what, Body&& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Number<Float16>{});
    case DType::kBfloat16:
      return body(Number<Bfloat16>{});
    case DType::kFloat32:
      return body(Number<float>{});
    case DType::kFloat64:
      return body(Number<double>{});
    default:
      throw Error(ErrorKind::kValue, std::string("cuda: ") + what +
                                         " is for float16, bfloat16, float32 and float64, not " +
                                         std::string(dtype_name(dtype)));
  }
}

template <class Numbers>
__global__ void __launch_bounds__(kThreads)
    find_kernel(const typename Numbers::Bits* values, Flat flat, int32_t* found) {
  bool finite = true;
  for_flat<typename Numbers::Packed>(values, flat, [&](auto bits) { finite &= Numbers::finite(bits); });
  if (!finite) *found = 1;
}

}  // namespace

void find_non_finite(const void* values, std::size_t count, DType dtype, int32_t* found, Stream stream) {
  with_numbers(dtype, "find_non_finite", [&]<class Numbers>(Numbers) {
    const auto* bits = static_cast<const typename Numbers::Bits*>(values);
    const Flat all = flat(values, count, sizeof *bits);
    launch("look for infinities", stream, all.tiles(), find_kernel<Numbers>, bits, all, found);
  });
}

}  // namespace ringdp::cuda
