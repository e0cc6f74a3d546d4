// Codes that number levels (nf4), by tables made of Block::kLevels: words of four levels, from which bytes are picked,
// and a table of 32 entries with one in each lane of a warp. Any thread of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "cuda/launch.cuh"

namespace ringdp::cuda {

inline constexpr int kByteZero = 128;  // whole numbers are bytes plus that

// The levels of codes 4 · kWhich and after, four bytes, the first in the lowest.
template <class Block, int kWhich, int kNext = 0>
inline constexpr uint32_t kFourLevels =
    static_cast<uint32_t>(Block::kLevels[4 * kWhich + kNext] + kByteZero) << 8 * kNext |
    kFourLevels<Block, kWhich, kNext + 1>;
template <class Block, int kWhich>
inline constexpr uint32_t kFourLevels<Block, kWhich, 4> = 0;

// The levels, plus kByteZero, of the four codes in the low 16 bits; that of the lowest code in the lowest byte.
template <class Block>
__device__ inline uint32_t four_levels(uint32_t codes) {
  const uint32_t place = codes & 0x7777u;
  const uint32_t low = __byte_perm(kFourLevels<Block, 0>, kFourLevels<Block, 1>, place);
  const uint32_t high = __byte_perm(kFourLevels<Block, 2>, kFourLevels<Block, 3>, place);
  return __byte_perm(low, high, 0x3210u | (codes >> 1 & 0x4444u));
}

// For each eight whole numbers side by side, as bytes: 256 times how many midpoints of levels are below all of them,
// and what makes a number carry that is above the one midpoint among them.
template <class Block>
struct LevelTable {
  static constexpr int kShift = 3;
  uint32_t entry[kWarp] = {};
  bool one_each = true;

  RINGDP_HOST_DEVICE constexpr LevelTable() {
    bool taken[kWarp] = {};
    for (int code = 1; code < 16; ++code) {
      const int midpoint = (Block::kLevels[code - 1] + Block::kLevels[code] + 2 * kByteZero) / 2;
      const int here = midpoint >> kShift;
      one_each &= !taken[here];
      taken[here] = true;
      entry[here] += static_cast<uint32_t>(255 - midpoint);
      for (int above = here + 1; above < kWarp; ++above) entry[above] += 256;
    }
  }
};

template <class Block>
__device__ inline uint32_t level_entry(unsigned lane) {
  static constexpr LevelTable<Block> kTable;
  static_assert(kTable.one_each);
  return kTable.entry[lane];
}

// The code of the nearest level, the lower one of two as near, in byte 1. `sum`: the whole number plus kByteZero in
// byte 0, nothing in byte 1; `mine`: the lane's entry. All lanes.
template <class Block>
__device__ inline uint32_t with_code(uint32_t sum, uint32_t mine) {
  return sum + __shfl_sync(kAllLanes, mine, sum >> LevelTable<Block>::kShift);
}

}  // namespace ringdp::cuda
