// float16 and bfloat16 on the device. The hardware converts float16 as kernels/half.h does, but for NaNs, of which it
// makes one; to bfloat16 it does not on every architecture, and the definition's own arithmetic is short. Any thread
// of a kernel.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/elements.h"

namespace ringdp::cuda {

using kernels::Bfloat16;
using kernels::Float16;

// A NaN becomes some NaN.
template <class Format>
__device__ inline float widen_number(uint16_t x) {
  if constexpr (std::is_same_v<Format, Float16>)
    return __half2float(__ushort_as_half(x));
  else
    return Format::widen(x);
}
template <class Format>
__device__ inline uint16_t narrow_number(float x) {
  if constexpr (std::is_same_v<Format, Float16>)
    return __half_as_ushort(__float2half_rn(x));
  else
    return Format::narrow(x);
}

// Every bit as on the CPU. A NaN among four is rare, so it is asked for once.
template <class Format>
__device__ inline uint64_t narrow_quad(const float* x) {
  bool numbers = true;
  for (int i = 0; i < 4; ++i) numbers &= x[i] == x[i];
  uint64_t quad = 0;
  if (numbers) {
#pragma unroll
    for (int i = 0; i < 4; ++i) quad |= static_cast<uint64_t>(narrow_number<Format>(x[i])) << 16 * i;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) quad |= static_cast<uint64_t>(Format::narrow(x[i])) << 16 * i;
  }
  return quad;
}

// One bit of two 16-bit floats, which lie in a word: the sign bit is set for an infinity or a NaN.
template <class Format>
__device__ inline uint32_t non_finite_pair(uint32_t pair) {
  constexpr uint32_t kOne = kernels::Exponent<Format>::kOne;
  return ((pair & 0x7fff7fffu) + (kOne << 16 | kOne)) & 0x80008000u;
}

template <class Format>
__device__ inline bool finite_quad(uint64_t quad) {
  const uint32_t low = static_cast<uint32_t>(quad), high = static_cast<uint32_t>(quad >> 32);
  return (non_finite_pair<Format>(low) | non_finite_pair<Format>(high)) == 0;
}

template <class Format>
__device__ inline void widen_quad(float* x, uint64_t quad) {
  if (finite_quad<Format>(quad)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = widen_number<Format>(static_cast<uint16_t>(quad >> 16 * i));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = Format::widen(static_cast<uint16_t>(quad >> 16 * i));
  }
}

}  // namespace ringdp::cuda
