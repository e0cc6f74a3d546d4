// Sparse codes: places and values of the elements above some magnitude; the others decode to 0. Unlike the codes of
// codec.h their length depends on their content, so a peer's code is checked before it is used.
//   header: 16 bytes: uint32 kind (0 sparse, 1 dense), uint32 entries, float32 scale, uint32 zero; all little-endian.
//   sparse: a byte for each block of 256 elements, how many entries it has; a byte for each entry, its place in the
//           block, ascending; a float16 for each entry, its value / scale.
//   dense:  a float16 for each element: where that is shorter, or a block is full.
// `scale` is a power of two by which the largest value fits float16; a NaN marks that an element was not finite, and
// all elements then decode to NaN. Stateless, any thread; every instruction set gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/codec.h"

namespace ringdp::sparse {

using Code = std::vector<std::byte>;

inline constexpr std::size_t kBlock = 256;
inline constexpr float kLeastThreshold = 0x1p-100f;

struct Selected {
  Code code;
  std::size_t found = 0;    // elements of that magnitude, also those that are not in the code
  std::size_t entries = 0;  // in the code
};

// v = x + factor·residual; the code has the v whose magnitude is at least `threshold` (taken as kLeastThreshold at
// least), of those that equal it the first `equals`, and of all these the first `most`. new_residual = (v -
// decode(code)) / factor, may be residual, and is undefined if an element is not finite. Both residuals null: without
// feedback.
Selected select(const float* x, const float* residual, float* new_residual, float factor, float threshold,
                std::size_t most, std::size_t count, std::size_t equals = SIZE_MAX);

// Throws Error(kValue) if the bytes are not a code of `count` elements: a wrong length, count or place.
void check(std::span<const std::byte> code, std::size_t count);
std::size_t entries(std::span<const std::byte> code);  // of a checked code; of a dense one: count

// All below: of checked codes.
void decode_set(float* out, std::span<const std::byte> code, std::size_t count);

// The code of (Σ of the decoded codes, added in their order in float32) / divisor, with the places that any of them
// has. Its rounding error, times `back`, is added to `lost` [count] if that is not null.
Code merge(std::span<const std::span<const std::byte>> codes, float divisor, float* lost, float back,
           std::size_t count);

}  // namespace ringdp::sparse
