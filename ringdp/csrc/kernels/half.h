// One element of float16 and bfloat16 to float32 and back, rounding to nearest, ties to even.
// These define the bits; vector versions reproduce them. Stateless, any thread.
//   float16: as the hardware converts (VCVTPH2PS, VCVTPS2PH): a NaN keeps its sign and upper payload bits and becomes
//     quiet.
//   bfloat16: as torch's c10::BFloat16 rounds: every NaN becomes 0x7fc0.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace ringdp::kernels {

RINGDP_ALWAYS_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);  // float32's exponent bias is 112 more
  const uint32_t special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x00400000u : 0u);
  const uint32_t subnormal = bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x0400u ? subnormal : normal;
  return bits_as<float>(sign | (magnitude >= 0x7c00u ? special : finite));
}

RINGDP_ALWAYS_INLINE uint16_t float_to_half(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // A step of float32 at 0.5 is 2^-24, the step of subnormal halves: the addition rounds.
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;                // 2^-14
  return static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite));  // from 65520 on: infinity
}

RINGDP_ALWAYS_INLINE float bfloat_to_float(uint16_t bfloat) {
  return bits_as<float>(static_cast<uint32_t>(bfloat) << 16);
}

RINGDP_ALWAYS_INLINE uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

struct Float16 {
  static RINGDP_ALWAYS_INLINE float widen(uint16_t x) { return half_to_float(x); }
  static RINGDP_ALWAYS_INLINE uint16_t narrow(float x) { return float_to_half(x); }
};

struct Bfloat16 {
  static RINGDP_ALWAYS_INLINE float widen(uint16_t x) { return bfloat_to_float(x); }
  static RINGDP_ALWAYS_INLINE uint16_t narrow(float x) { return float_to_bfloat(x); }
};

}  // namespace ringdp::kernels
