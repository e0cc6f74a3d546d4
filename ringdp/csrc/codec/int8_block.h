// The block of int8: a float32 scale and a byte for each element (blocks.h). Stateless, any thread.
#pragma once

#include "codec/block.h"

namespace ringdp::codecs {

struct Int8Block {
  static constexpr std::size_t kElements = 256;
  static constexpr int kBits = 8;  // the whole numbers are the codes
  static constexpr bool kUniform = true;
  static constexpr bool kSigned = false;  // its scale
  static constexpr float kHighest = 127.0f;
  static constexpr float kLowest = -127.0f;
  using Scale = float;

  static RINGDP_ALWAYS_INLINE Scaling scaling(float absmax) {
    if (absmax == 0.0f || absmax >= kTiny) return plain_scaling(absmax);
    return {absmax / kHighest, kTinyFactor, kHighest / (absmax * kTinyFactor)};
  }
  // Where absmax is 0 or at least kTiny.
  static RINGDP_ALWAYS_INLINE Scaling plain_scaling(float absmax) {
    return {absmax / kHighest, 1.0f, absmax == 0.0f ? 0.0f : kHighest / absmax};
  }
  static RINGDP_ALWAYS_INLINE Scale stored(float scale) { return scale; }
  static RINGDP_ALWAYS_INLINE float loaded(Scale scale) { return scale; }
  static RINGDP_HOST_DEVICE constexpr std::size_t across(int plane) { return plane == 0 ? kElements : 0; }
};

}  // namespace ringdp::codecs
