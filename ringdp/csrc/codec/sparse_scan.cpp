#include "codec/sparse_scan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringdp::sparse {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;

bool any(const uint64_t* large) { return (large[0] | large[1] | large[2] | large[3]) != 0; }

// Elements [begin, n) of the block, one by one.
void scan_rest(float* v, uint64_t* large, const Scan& scan, std::size_t at, std::size_t begin, std::size_t n) {
  for (std::size_t i = begin; i < n; ++i) {
    v[i] = scan.x[at + i];
    if (scan.residual != nullptr) {
      v[i] = v[i] + scan.factor * scan.decay * scan.residual[at + i];
      scan.new_residual[at + i] = v[i] * (1.0f / scan.factor);
    }
    const uint32_t magnitude = std::bit_cast<uint32_t>(v[i]) & kMagnitude;
    if (magnitude >= scan.threshold) large[i / 64] |= uint64_t{1} << i % 64;
  }
}

bool scan_scalar(float* v, uint64_t* large, const Scan& scan, std::size_t at, std::size_t n) {
  large[0] = large[1] = large[2] = large[3] = 0;
  scan_rest(v, large, scan, at, 0, n);
  return any(large);
}

#if defined(__x86_64__)

RINGDP_TARGET_AVX2 bool scan_avx2(float* v, uint64_t* large, const Scan& scan, std::size_t at, std::size_t n) {
  large[0] = large[1] = large[2] = large[3] = 0;
  const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(kMagnitude));
  const __m256i below = _mm256_set1_epi32(static_cast<int>(scan.threshold - 1));
  const __m256 factor = _mm256_set1_ps(scan.factor * scan.decay), inverse = _mm256_set1_ps(1.0f / scan.factor);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 value = _mm256_loadu_ps(scan.x + at + i);
    if (scan.residual != nullptr) {
      value = _mm256_add_ps(value, _mm256_mul_ps(factor, _mm256_loadu_ps(scan.residual + at + i)));
      _mm256_storeu_ps(scan.new_residual + at + i, _mm256_mul_ps(value, inverse));
    }
    _mm256_storeu_ps(v + i, value);
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(value), magnitude);
    const auto found = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, below))));
    large[i / 64] |= static_cast<uint64_t>(found) << i % 64;
  }
  scan_rest(v, large, scan, at, i, n);
  return any(large);
}

RINGDP_TARGET_AVX512 bool scan_avx512(float* v, uint64_t* large, const Scan& scan, std::size_t at, std::size_t n) {
  large[0] = large[1] = large[2] = large[3] = 0;
  const __m512i magnitude = _mm512_set1_epi32(static_cast<int>(kMagnitude));
  const __m512i threshold = _mm512_set1_epi32(static_cast<int>(scan.threshold));
  const __m512 factor = _mm512_set1_ps(scan.factor * scan.decay), inverse = _mm512_set1_ps(1.0f / scan.factor);
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m512 value = _mm512_loadu_ps(scan.x + at + i);
    if (scan.residual != nullptr) {
      value = _mm512_add_ps(value, _mm512_mul_ps(factor, _mm512_loadu_ps(scan.residual + at + i)));
      _mm512_storeu_ps(scan.new_residual + at + i, _mm512_mul_ps(value, inverse));
    }
    _mm512_storeu_ps(v + i, value);
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(value), magnitude);
    large[i / 64] |= static_cast<uint64_t>(_mm512_cmpge_epu32_mask(bits, threshold)) << i % 64;
  }
  scan_rest(v, large, scan, at, i, n);
  return any(large);
}

#endif

}  // namespace

ScanBlock scan_block([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return scan_avx512;
  if (isa == Isa::kAvx2) return scan_avx2;
#endif
  return scan_scalar;
}

namespace {

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
