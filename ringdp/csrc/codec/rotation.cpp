#include "codec/rotation.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/kernels.h"

namespace ringdp::rotation {
namespace {

constexpr float kShrink = 1.0f / 16;  // 1 / √256; applied before the sums, so that they overflow least

using Factors = std::array<float, kBlock>;

namespace scalar {
#define RINGDP_ROTATION_TARGET
#include "codec/rotation_loops.inc"
}  // namespace scalar

#if defined(__x86_64__)

namespace avx2 {
#define RINGDP_ROTATION_TARGET RINGDP_TARGET_AVX2
#include "codec/rotation_loops.inc"
}  // namespace avx2

#endif

Factors factors(Signs signs, float size) {
  Factors out;
  for (std::size_t i = 0; i < kBlock; ++i) out[i] = (signs[i / 8] >> i % 8 & 1) != 0 ? -size : size;
  return out;
}

void rotate_all(float* out, const float* x, std::size_t count, const Factors& before, const Factors& after) {
  auto* blocks = scalar::rotate_blocks;
#if defined(__x86_64__)
  if (current_isa() != Isa::kScalar)
    blocks = avx2::rotate_blocks;  // 512 bits are slower: half of the steps have few lanes
#endif
  blocks(out, x, count / kBlock, before.data(), after.data());
  const std::size_t done = count / kBlock * kBlock;
  if (out != x) std::copy(x + done, x + count, out + done);
}

}  // namespace

void rotate(float* out, const float* x, std::size_t count, Signs signs) {
  Factors none;
  none.fill(1.0f);
  rotate_all(out, x, count, factors(signs, kShrink), none);
}

void rotate_back(float* out, const float* x, std::size_t count, Signs signs) {
  Factors shrink;
  shrink.fill(kShrink);
  rotate_all(out, x, count, shrink, factors(signs, 1.0f));
}

}  // namespace ringdp::rotation
