// hash64: values that stay, a reference that goes byte by byte, and every flipped bit.
#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/hash64.h"
#include "testing.h"

namespace ringdp {
namespace {

std::vector<std::byte> noise(std::size_t count) {
  std::mt19937_64 random(23);
  std::vector<std::byte> out(count);
  for (std::byte& it : out) it = static_cast<std::byte>(random());
  return out;
}

uint64_t hash(std::string_view text, uint64_t seed = 0) { return hash64(std::as_bytes(std::span(text)), seed); }

uint64_t spread(uint64_t x) {
  x = (x ^ (x >> 32)) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 29)) * 0x9E3779B97F4A7C15ULL;
  return x ^ (x >> 32);
}

// Word k goes to lane k modulo 8; the last word is filled up with zeros.
uint64_t by_bytes(std::span<const std::byte> data, uint64_t seed) {
  std::vector<uint64_t> lanes;
  for (uint64_t i = 1; i <= 8; ++i) lanes.push_back(spread(seed + i));
  for (std::size_t word = 0; 8 * word < data.size(); ++word) {
    uint64_t value = 0;
    for (std::size_t i = 8 * word; i < std::min(8 * word + 8, data.size()); ++i)
      value |= std::to_integer<uint64_t>(data[i]) << (8 * (i % 8));
    uint64_t& lane = lanes[word % 8];
    lane = (lane ^ value) * 0x9E3779B97F4A7C15ULL;
    lane = (lane << 29) | (lane >> 35);
  }
  uint64_t out = spread(seed ^ data.size());
  for (uint64_t lane : lanes) out = spread(out ^ lane);
  return out;
}

CASE("hash64 gives the values that it has always given") {
  CHECK_EQ(hash(""), 0xFF4FF05027296DF9ULL);
  CHECK_EQ(hash("", 1), 0x680C50DFDF69CD43ULL);
  CHECK_EQ(hash("a"), 0xDF7F59482E592E11ULL);
  CHECK_EQ(hash("123456789"), 0xCB249FB4A442E873ULL);
  CHECK_EQ(hash(std::string(1000, 'x'), 7), 0x7D1469E8301D1636ULL);
}

CASE("hash64 agrees with its reference for all lengths and places in memory") {
  const auto data = noise(700);
  for (std::size_t begin : {0, 1, 3, 7, 8, 13})
    for (std::size_t count = 0; begin + count <= data.size(); ++count) {
      const auto part = std::span(data).subspan(begin, count);
      CHECK_EQ(hash64(part, begin), by_bytes(part, begin));
    }
}

CASE("no flipped bit leaves hash64 as it was, nor do zeros at the end") {
  auto data = noise(333);
  const uint64_t whole = hash64(data);
  for (std::size_t bit = 0; bit < 8 * data.size(); ++bit) {
    data[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK(hash64(data) != whole);
    data[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  std::set<uint64_t> seen;
  for (std::size_t count = 0; count < 200; ++count) seen.insert(hash64(std::vector<std::byte>(count)));
  CHECK_EQ(seen.size(), std::size_t{200});
}

CASE("swapped words give another hash64, in one lane and in two") {
  auto data = noise(256);
  const uint64_t whole = hash64(data);
  for (std::size_t other : {8, 64}) {
    std::swap_ranges(data.begin(), data.begin() + 8, data.begin() + static_cast<std::ptrdiff_t>(other));
    CHECK(hash64(data) != whole);
    std::swap_ranges(data.begin(), data.begin() + 8, data.begin() + static_cast<std::ptrdiff_t>(other));
  }
}

}  // namespace
}  // namespace ringdp
