// The block of nf4: planes as those of int4, codes for 16 levels (blocks.h). Stateless, any thread.
#pragma once

#include "codec/nibble_block.h"

namespace ringdp::codecs {

// 16 levels in 127ths, denser near zero as NormalFloat's (Dettmers et al., "QLoRA", NeurIPS 2023, arXiv 2305.14314,
// appendix E), but for a scale with a sign: the greatest element of a block has the level at one end to itself. Least
// squared error (Lloyd, IEEE Trans. Information Theory 28, 1982) over blocks of Gaussian numbers and of such times
// exp(0.5 · another), 0 kept; -11, not -10, so that what becomes it is at least half of it, and the residual exact.
struct Nf4Block : NibbleBlock<4, -127, 127> {
  static constexpr bool kUniform = false;
  static constexpr uint8_t kZero = 7;
  static constexpr int8_t kLevels[16] = {-127, -92, -68, -49, -34, -21, -11, 0, 8, 17, 27, 38, 51, 66, 85, 109};

  // The nearest level, the lower one of two as near: by halves, of which all lanes of a vector take the same steps.
  static RINGDP_ALWAYS_INLINE uint8_t code_of(int8_t whole) {
    uint8_t set[kBits];
    set[3] = all_bits(whole > midpoint<3, 3, 0>(set));
    set[2] = all_bits(whole > midpoint<3, 2, 0>(set));
    set[1] = all_bits(whole > midpoint<3, 1, 0>(set));
    set[0] = all_bits(whole > midpoint<3, 0, 0>(set));
    return static_cast<uint8_t>((set[3] & 8) | (set[2] & 4) | (set[1] & 2) | (set[0] & 1));
  }
  static RINGDP_ALWAYS_INLINE uint8_t whole_of(uint8_t code) {
    const uint8_t set[kBits] = {all_bits(code & 1), all_bits(code >> 1 & 1), all_bits(code >> 2 & 1),
                                all_bits(code >> 3 & 1)};
    return level<3, 0>(set);
  }

 private:
  // 255 where `bit` is 1, 0 where it is 0.
  static RINGDP_ALWAYS_INLINE uint8_t all_bits(int bit) { return static_cast<uint8_t>(-bit); }
  static RINGDP_ALWAYS_INLINE uint8_t chosen(uint8_t set, uint8_t clear, uint8_t other) {
    return static_cast<uint8_t>(clear ^ (set & (clear ^ other)));
  }

  // The one above which bit kBit of the code is set, given those above it; kFirst: the code so far, kNext: the bit to
  // look at.
  template <int kNext, int kBit, int kFirst>
  static RINGDP_ALWAYS_INLINE int8_t midpoint(const uint8_t (&set)[kBits]) {
    if constexpr (kNext == kBit) {
      constexpr int kLower = kFirst + (1 << kBit) - 1, kBoth = kLevels[kLower] + kLevels[kLower + 1];
      return static_cast<int8_t>(kBoth >> 1);
    } else {
      return static_cast<int8_t>(chosen(set[kNext], static_cast<uint8_t>(midpoint<kNext - 1, kBit, kFirst>(set)),
                                        static_cast<uint8_t>(midpoint<kNext - 1, kBit, kFirst + (1 << kNext)>(set))));
    }
  }

  template <int kNext, int kFirst>
  static RINGDP_ALWAYS_INLINE uint8_t level(const uint8_t (&set)[kBits]) {
    if constexpr (kNext < 0)
      return static_cast<uint8_t>(kLevels[kFirst]);
    else
      return chosen(set[kNext], level<kNext - 1, kFirst>(set), level<kNext - 1, kFirst + (1 << kNext)>(set));
  }
};

}  // namespace ringdp::codecs
