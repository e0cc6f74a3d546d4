// Eight lanes of 64 bits take a word each, in turn: xor, multiply by an odd number, rotate. Each of these steps is a
// bijection of the lane, so two inputs that differ in one word differ in that word's lane to the end; and the end is a
// bijection of each lane.
#include "kernels/hash64.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/bytes.h"

namespace ringdp {
namespace {

constexpr std::size_t kLanes = 8;
constexpr std::size_t kWordBytes = sizeof(uint64_t);
constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ULL;  // odd: the golden ratio's digits
constexpr int kRotation = 29;

constexpr uint64_t spread(uint64_t x) {
  x = (x ^ (x >> 32)) * kMultiplier;
  x = (x ^ (x >> 29)) * kMultiplier;
  return x ^ (x >> 32);
}

inline uint64_t step(uint64_t lane, uint64_t word) { return std::rotl((lane ^ word) * kMultiplier, kRotation); }

}  // namespace

uint64_t hash64(std::span<const std::byte> bytes, uint64_t seed) {
  std::array<uint64_t, kLanes> lanes;
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = spread(seed + i + 1);
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= kLanes * kWordBytes; at += kLanes * kWordBytes, left -= kLanes * kWordBytes)
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], take<uint64_t>(at + i * kWordBytes));
  std::size_t lane = 0;
  for (; left >= kWordBytes; at += kWordBytes, left -= kWordBytes, ++lane)
    lanes[lane] = step(lanes[lane], take<uint64_t>(at));
  if (left > 0) {
    uint64_t word = 0;
    std::memcpy(&word, at, left);
    lanes[lane] = step(lanes[lane], word);
  }
  uint64_t hash = spread(seed ^ bytes.size());
  for (const uint64_t it : lanes) hash = spread(hash ^ it);
  return hash;
}

}  // namespace ringdp
