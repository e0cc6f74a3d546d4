// float16 and bfloat16 as codecs: element by element, rounded to nearest, ties to even; what overflows becomes
// infinite, as in a cast. Built on the reduction kernels of those types, whose instruction set is the selected one.
// Stateless, any thread.
#pragma once

#include "codec/codec.h"
#include "kernels/elements.h"
#include "kernels/kernels.h"

namespace ringdp::codecs {

// kKernels: reduce_kernels or reduce_kernels_reference.
template <DType kType, const ReduceKernels& (*kKernels)(DType, ReduceOp)>
struct Casts {
  static constexpr std::size_t kElements = 1;
  static constexpr std::size_t kTile = 256;  // stays in the first-level cache
  static constexpr uint16_t kExponent = kType == DType::kFloat16 ? 0x7c00 : 0x7f80;

  static std::size_t bytes(std::size_t count) { return count * sizeof(uint16_t); }

  static bool all_finite(const uint16_t* x, std::size_t n) {
    uint16_t found = 0;
    for (std::size_t i = 0; i < n; ++i) found |= static_cast<uint16_t>((x[i] & kExponent) == kExponent ? 1 : 0);
    return found == 0;
  }

  static Encoded narrow(uint16_t* out, const float* x, std::size_t n) {
    kKernels(kType, ReduceOp::kSum).store(out, x, 1.0f, n);
    return all_finite(out, n) ? Encoded::kFinite : Encoded::kNonFinite;
  }

  static Encoded compress(std::byte* code, const float* x, std::size_t count) {
    Encoded seen = Encoded::kFinite;
    uint16_t tile[kTile];
    for (std::size_t at = 0; at < count; at += kTile) {
      const std::size_t n = std::min(kTile, count - at);
      if (narrow(tile, x + at, n) == Encoded::kNonFinite) seen = Encoded::kNonFinite;
      std::memcpy(code + bytes(at), tile, bytes(n));
    }
    return seen;
  }

  static Encoded compress_with_feedback(std::byte* code, const float* x, const float* residual, float* new_residual,
                                        float factor, std::size_t count) {
    const ReduceKernels& loops = kKernels(kType, ReduceOp::kSum);
    const float inverse = 1.0f / factor;
    Encoded seen = Encoded::kFinite;
    float v[kTile];
    float decoded[kTile];
    uint16_t tile[kTile];
    for (std::size_t at = 0; at < count; at += kTile) {
      const std::size_t n = std::min(kTile, count - at);
      for (std::size_t i = 0; i < n; ++i) v[i] = kernels::Sum::apply(x[at + i], factor * residual[at + i]);
      const Encoded here = narrow(tile, v, n);
      std::memcpy(code + bytes(at), tile, bytes(n));
      loops.load(decoded, tile, n);
      if (here == Encoded::kFinite) {
        for (std::size_t i = 0; i < n; ++i) new_residual[at + i] = (v[i] - decoded[i]) * inverse;
        continue;
      }
      seen = here;
      for (std::size_t i = 0; i < n; ++i)
        new_residual[at + i] = all_finite(tile + i, 1) ? (v[i] - decoded[i]) * inverse : residual[at + i];
    }
    return seen;
  }

  template <class Use>
  static void for_each_tile(const std::byte* code, std::size_t count, Use&& use) {
    uint16_t tile[kTile];
    for (std::size_t at = 0; at < count; at += kTile) {
      const std::size_t n = std::min(kTile, count - at);
      std::memcpy(tile, code + bytes(at), bytes(n));
      use(at, tile, n);
    }
  }

  static void decode_set(float* out, const std::byte* code, std::size_t count) {
    const ReduceKernels& kernels = kKernels(kType, ReduceOp::kSum);
    for_each_tile(code, count,
                  [&](std::size_t at, const uint16_t* tile, std::size_t n) { kernels.load(out + at, tile, n); });
  }

  static Encoded inspect(const std::byte* code, std::size_t count) {
    bool finite = true;
    for_each_tile(code, count,
                  [&](std::size_t, const uint16_t* tile, std::size_t n) { finite &= all_finite(tile, n); });
    return finite ? Encoded::kFinite : Encoded::kNonFinite;
  }

  static void decode_add(float* sum, const std::byte* code, std::size_t count) {
    const ReduceKernels& kernels = kKernels(kType, ReduceOp::kSum);
    for_each_tile(code, count,
                  [&](std::size_t at, const uint16_t* tile, std::size_t n) { kernels.accumulate(sum + at, tile, n); });
  }
};

}  // namespace ringdp::codecs
