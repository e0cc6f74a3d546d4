// A randomised Hadamard transform of blocks of 256 floats: y = H·D·x / 16 with D a diagonal of signs, and back. It
// makes blocks whose elements differ much in size look like Gaussian ones, which few levels suit better. H is built of
// sums and differences in a fixed order, and 1/16 is exact, so every instruction set gives the same bits. Stateless,
// any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ringdp::rotation {

inline constexpr std::size_t kBlock = 256;
using Signs =
    std::span<const uint8_t, kBlock / 8>;  // bit i % 8 of byte i / 8: element i of every block changes its sign

// Of `count` elements; those behind the last full block stay as they are. `out` may be `x`.
void rotate(float* out, const float* x, std::size_t count, Signs signs);
void rotate_back(float* out, const float* x, std::size_t count, Signs signs);

}  // namespace ringdp::rotation
