#include "codec/sparse_scan.h"

#include <bit>

#include "kernels/targets.h"

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
      v[i] = v[i] + scan.factor * scan.residual[at + i];
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
  const __m256 factor = _mm256_set1_ps(scan.factor), inverse = _mm256_set1_ps(1.0f / scan.factor);
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
  const __m512 factor = _mm512_set1_ps(scan.factor), inverse = _mm512_set1_ps(1.0f / scan.factor);
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

}  // namespace ringdp::sparse
