#include "codec/sparse_threshold.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "codec/sparse_scan.h"

namespace ringdp::sparse {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kLargestFinite = 0x7f7fffffu;
constexpr int kShift = 19;  // a bin for each exponent and the upper 4 bits of the mantissa
constexpr int kBits = 31;   // of a magnitude

// Calls `use(magnitude's bits)` for each element of one block in `step`, and returns how many those are.
template <class Use>
std::size_t look(const Looked& looked, std::size_t step, Use use) {
  std::size_t seen = 0;
  for (std::size_t at = 0; at < looked.count; at += kScanned * step) {
    const std::size_t end = std::min(at + kScanned, looked.count);
    seen += end - at;
    for (std::size_t i = at; i < end; ++i) {
      const float v = looked.residual == nullptr ? looked.x[i] : looked.x[i] + looked.factor * looked.residual[i];
      use(std::bit_cast<uint32_t>(v) & kMagnitude);
    }
  }
  return seen;
}

struct Place {
  uint32_t bin;
  std::size_t above, here;  // elements in the bins above it, and in it
};

// The highest bin that, together with the bins above it, has at least `aim` elements.
Place place_of(const std::vector<uint32_t>& histogram, double aim) {
  Place place{static_cast<uint32_t>(histogram.size()), 0, 0};
  do {
    place.above += place.here;
    place.here = histogram[--place.bin];
  } while (place.bin > 0 && (place.here == 0 || static_cast<double>(place.above + place.here) < aim));
  return place;
}

struct Rank {
  uint32_t bits;
  std::size_t above;  // how many are larger
};

// The magnitude of the `wanted`-th largest sample, by histograms of its bits from the top on.
Rank ranked(const Looked& looked, std::size_t step, std::size_t wanted) {
  Rank rank{0, 0};
  int upper = kBits;
  for (const int shift : {kShift, 9, 0}) {
    std::vector<uint32_t> histogram(std::size_t{1} << (upper - shift));
    const auto mask = static_cast<uint32_t>(histogram.size() - 1);
    look(looked, step, [&](uint32_t bits) {
      if (bits >> upper == rank.bits >> upper) ++histogram[bits >> shift & mask];
    });
    const Place place = place_of(histogram, static_cast<double>(wanted - rank.above));
    rank.bits |= place.bin << shift;
    rank.above += place.above;
    upper = shift;
  }
  return rank;
}

float magnitude_of(uint32_t bits) { return std::bit_cast<float>(std::min(bits, kLargestFinite)); }

}  // namespace

float estimate_threshold(const Looked& looked, std::size_t wanted) {
  constexpr std::size_t kLookedAt = 16;  // one block in so many is sampled; from a million elements on one in 32
  const std::size_t blocks = (looked.count + kScanned - 1) / kScanned;
  const std::size_t step = blocks >= 256 * kLookedAt ? 2 * kLookedAt : blocks >= 64 * kLookedAt ? kLookedAt : 1;
  // With many samples 16 times as many bins, so that fewer are too full; they stay in the second-level cache.
  const int shift = looked.count / step >= 1u << 18 ? kShift - 4 : kShift;
  std::vector<uint32_t> histogram(std::size_t{1} << (kBits - shift));
  const std::size_t seen = look(looked, step, [&](uint32_t bits) { ++histogram[bits >> shift]; });
  if (seen == 0) return 0.0f;
  const double aim = static_cast<double>(wanted) * static_cast<double>(seen) / static_cast<double>(looked.count);
  const Place place = place_of(histogram, aim);
  if (place.bin == 0) return 0.0f;
  const auto above = static_cast<double>(place.above), here = static_cast<double>(place.here);
  if (above < aim / 2 || above + here > 2 * aim)
    return magnitude_of(ranked(looked, step, static_cast<std::size_t>(std::ceil(aim))).bits);
  // Within the bin, elements are taken as evenly distributed.
  return magnitude_of(static_cast<uint32_t>((place.bin + 1 - (aim - above) / here) * (1u << shift)));
}

Cut exact_cut(const Looked& looked, std::size_t wanted) {
  const Rank rank = ranked(looked, 1, wanted);
  if (rank.bits > kLargestFinite) return {magnitude_of(rank.bits), 0};
  return {magnitude_of(rank.bits), wanted - rank.above};
}

}  // namespace ringdp::sparse
