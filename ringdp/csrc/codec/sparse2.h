// Sparse codes of 2-bit values: of every 4,096 elements (a chunk) the `kept` of the greatest magnitude, each in a byte,
// as in SparseLoCo (Sarfi et al., arXiv 2508.15706). A chunk of n elements, the last one may be shorter, has k =
// min(kept, n) entries in b = ⌈n / 64⌉ blocks; its code is, one chunk after the other:
//   2 bfloat16: the magnitudes `low` and `high`; both NaN where an element was not finite: entries decode to NaN.
//   ⌈(k + b) / 8⌉ bytes: for each block a one for each of its entries, then a zero; from the lowest bit of a byte up.
//   k bytes: for each entry, ascending, its place in the block; +64 if it is negative, +128 if its magnitude is `high`.
// So the length depends on the counts alone. With 64 of 4,096 a place takes 8 bits (7.4 are the least possible) and no
// byte is cut. But not all bytes are a code: a peer's is checked before it is used. Stateless, any thread; every
// instruction set gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/codec.h"

namespace ringdp::sparse2 {

inline constexpr std::size_t kChunk = 4096;
inline constexpr std::size_t kBlock = 64;

// `kept` is 1 to kChunk.
std::size_t encoded_bytes(std::size_t count, std::size_t kept);

// v = x + factor·decay·residual is encoded; new_residual = (v - decode(code)) / factor, may be residual, and is
// undefined if an element is not finite. Both residuals null: without feedback.
struct Input {
  const float* x;
  const float* residual = nullptr;
  float* new_residual = nullptr;
  float factor = 1.0f;  // a power of two
  float decay = 1.0f;
};

// `low` and `high` are the means of the magnitudes below and above the mean of all. Of equal magnitudes the first are
// kept.
Encoded encode(std::byte* code, const Input& input, std::size_t count, std::size_t kept);

// Throws Error(kValue) if the bytes are not a code of `count` elements.
void check(std::span<const std::byte> code, std::size_t count, std::size_t kept);

// sum += weight · decode(code), of a checked code.
Encoded decode_add(float* sum, const std::byte* code, float weight, std::size_t count, std::size_t kept);

}  // namespace ringdp::sparse2
