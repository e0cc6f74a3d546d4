// CRC32C by the instructions of x86-64 processors. crc32c.cpp asks the CPU for the features named here.
#include "kernels/crc32c.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#define RINGDP_TARGET_CRC_SSE42 __attribute__((target("sse4.2,pclmul")))
#define RINGDP_TARGET_CRC_AVX512 __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

namespace ringdp::kernels {
namespace {

inline uint64_t load_word(const std::byte* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

// The state (not inverted) behind `count` more bytes.
RINGDP_TARGET_CRC_SSE42 uint64_t step_bytes(uint64_t crc, const std::byte* bytes, std::size_t count) {
  for (; count >= 8; bytes += 8, count -= 8) crc = _mm_crc32_u64(crc, load_word(bytes));
  for (; count > 0; ++bytes, --count) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), std::to_integer<uint8_t>(*bytes));
  return crc;
}

// The state behind `kBytes` zero bytes. The product of two reflected words has a factor x too many, the instruction
// multiplies by x^32: hence the 33.
template <std::size_t kBytes>
RINGDP_TARGET_CRC_SSE42 inline uint64_t shifted(uint64_t crc) {
  constexpr uint32_t power = crc32c_power(8 * kBytes - 33);
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(crc)), _mm_cvtsi32_si128(static_cast<int>(power)), 0);
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

// Three streams of kBytes each, one behind the other in memory, until less than three are left.
template <std::size_t kBytes>
RINGDP_TARGET_CRC_SSE42 inline uint64_t step_streams(uint64_t crc, const std::byte*& bytes, std::size_t& count) {
  for (; count >= 3 * kBytes; bytes += 3 * kBytes, count -= 3 * kBytes) {
    uint64_t second = 0, third = 0;
    for (std::size_t i = 0; i < kBytes; i += 8) {
      crc = _mm_crc32_u64(crc, load_word(bytes + i));
      second = _mm_crc32_u64(second, load_word(bytes + kBytes + i));
      third = _mm_crc32_u64(third, load_word(bytes + 2 * kBytes + i));
    }
    crc = shifted<2 * kBytes>(crc) ^ shifted<kBytes>(second) ^ third;
  }
  return crc;
}

RINGDP_TARGET_CRC_AVX512 inline __m512i load_lanes(const std::byte* at) { return _mm512_loadu_si512(at); }

// Each lane of 128 bits times x^kBits, with `next` added. Its lower half comes first, so it stands for the higher
// powers.
template <unsigned kBits>
RINGDP_TARGET_CRC_AVX512 inline __m512i fold(__m512i lanes, __m512i next) {
  constexpr int64_t low = crc32c_power(kBits + 31), high = crc32c_power(kBits - 33);
  const __m512i powers = _mm512_set_epi64(high, low, high, low, high, low, high, low);
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, powers, 0x00),
                                   _mm512_clmulepi64_epi128(lanes, powers, 0x11), next, 0x96);
}

template <unsigned kBits>
RINGDP_TARGET_CRC_AVX512 inline __m128i fold(__m128i lane, __m128i next) {
  const __m128i powers = _mm_set_epi64x(crc32c_power(kBits - 33), crc32c_power(kBits + 31));
  return _mm_xor_si128(
      next, _mm_xor_si128(_mm_clmulepi64_si128(lane, powers, 0x00), _mm_clmulepi64_si128(lane, powers, 0x11)));
}

constexpr std::size_t kFoldBytes = 256;

}  // namespace

RINGDP_TARGET_CRC_SSE42 uint32_t crc32c_sse42(uint32_t before, const std::byte* bytes, std::size_t count) {
  uint64_t crc = ~before;
  crc = step_streams<2048>(crc, bytes, count);
  crc = step_streams<128>(crc, bytes, count);
  return ~static_cast<uint32_t>(step_bytes(crc, bytes, count));
}

RINGDP_TARGET_CRC_AVX512 uint32_t crc32c_avx512(uint32_t before, const std::byte* bytes, std::size_t count) {
  if (count < 2 * kFoldBytes) return crc32c_sse42(before, bytes, count);
  __m512i a = load_lanes(bytes), b = load_lanes(bytes + 64), c = load_lanes(bytes + 128), d = load_lanes(bytes + 192);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~before))));
  for (bytes += kFoldBytes, count -= kFoldBytes; count >= kFoldBytes; bytes += kFoldBytes, count -= kFoldBytes) {
    a = fold<8 * kFoldBytes>(a, load_lanes(bytes));
    b = fold<8 * kFoldBytes>(b, load_lanes(bytes + 64));
    c = fold<8 * kFoldBytes>(c, load_lanes(bytes + 128));
    d = fold<8 * kFoldBytes>(d, load_lanes(bytes + 192));
  }
  d = fold<512>(fold<512>(fold<512>(a, b), c), d);
  for (; count >= 64; bytes += 64, count -= 64) d = fold<512>(d, load_lanes(bytes));
  alignas(64) __m128i lanes[4];
  _mm512_store_si512(lanes, d);
  const __m128i lane = fold<128>(fold<128>(fold<128>(lanes[0], lanes[1]), lanes[2]), lanes[3]);
  uint64_t crc = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(lane)));
  crc = _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(lane, 1)));
  return ~static_cast<uint32_t>(step_bytes(crc, bytes, count));
}

}  // namespace ringdp::kernels

#endif
