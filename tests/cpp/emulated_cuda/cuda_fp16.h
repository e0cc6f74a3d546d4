// float16 as the device converts it: as the definition does, but every NaN becomes the same one.
#pragma once

#include "kernels/half.h"

struct __half {
  uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half half) { return half.bits; }
inline float __half2float(__half half) {
  const float value = ringdp::kernels::half_to_float(half.bits);
  return value == value ? value : ringdp::bits_as<float>(0x7fffffffu);
}
inline __half __float2half_rn(float value) {
  return {value == value ? ringdp::kernels::float_to_half(value) : uint16_t{0x7fff}};
}
