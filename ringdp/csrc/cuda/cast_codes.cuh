// float16 and bfloat16 as codecs on the device: the same face as BlockCodes, without a scale.
#pragma once

#include "cuda/halves.cuh"
#include "cuda/launch.cuh"
#include "cuda/shares.cuh"

namespace ringdp::cuda {

template <class Format>
struct CastCodes {
  using Unit = uint64_t;  // a quad
  static constexpr std::size_t kGroup = kStep;
  static constexpr int kUnits = kShare / kQuad;

  struct Code {
    Unit units[kUnits];
  };
  using Loaded = Code;

  static constexpr bool kKeepsNans = true;
  static constexpr int kPlanes = 1;
  static RINGDP_HOST_DEVICE std::size_t plane(int, std::size_t) { return 0; }

  template <Access kAccess>
  static __device__ Loaded load(const std::byte* code, std::size_t begin, int step, std::size_t count, unsigned lane) {
    Loaded loaded;
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      loaded.units[i] = load_unit<kAccess, Unit>(code, place(begin, step, lane, i), 2 * count);
    return loaded;
  }
  static __device__ Code taken(const Loaded& loaded, unsigned) { return loaded; }

  template <Access kAccess>
  static __device__ void store(std::byte* code, const Code& it, std::size_t begin, int step, std::size_t count,
                               unsigned lane) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      store_unit<kAccess, Unit>(code, it.units[i], place(begin, step, lane, i), 2 * count);
  }

  static __device__ Code encode(const float (&v)[kShare], unsigned) {
    Code code;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) code.units[i] = narrow_quad<Format>(v + i * kQuad);
    return code;
  }

  static __device__ void decode(float (&values)[kShare], const Code& code) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) widen_quad<Format>(values + i * kQuad, code.units[i]);
  }
  static __device__ void decode_marked(float (&values)[kShare], const Code& code) { decode(values, code); }

  static __device__ bool finite(const Code& code, int i) {
    const auto bits = static_cast<uint16_t>(code.units[i / kQuad] >> 16 * (i % kQuad));
    return (kernels::carry_of_non_finite<Format>(bits) & kernels::kSignBit<Format>) == 0;
  }
  static __device__ bool finite(const Code& code) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) finite &= finite_quad<Format>(code.units[i]);
    return finite;
  }
  static __device__ bool decodes_finite(const Code& code, const float (&)[kShare], std::size_t, std::size_t, unsigned) {
    return finite(code);
  }

 private:
  static __device__ std::size_t place(std::size_t begin, int step, unsigned lane, int unit) {
    return 2 * (begin + static_cast<std::size_t>(step) * kStep + quad_of<kGroup>(lane, unit));
  }
};

}  // namespace ringdp::cuda
