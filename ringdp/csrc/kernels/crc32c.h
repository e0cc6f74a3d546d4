// CRC32C (Castagnoli, RFC 3720): the checksum that detects bits that a network has flipped. Every version gives the
// same value; the first call picks the fastest that this CPU has. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace ringdp {

// The checksum of `bytes`. crc32c(b, crc32c(a)) is the checksum of a followed by b.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before = 0);

struct Crc32cVersion {
  std::string_view name;
  uint32_t (*run)(uint32_t before, const std::byte* bytes, std::size_t count);
};

// Those that this CPU can run, the fastest last; for tests and benchmarks.
std::span<const Crc32cVersion> crc32c_versions();

}  // namespace ringdp

namespace ringdp::kernels {

// The versions, and the arithmetic that they share.

// Polynomials over two elements modulo 0x1EDC6F41, bits reflected: the highest bit of a word is the coefficient of x^0.
inline constexpr uint32_t kCrc32cPolynomial = 0x82F63B78;

// x^n mod the polynomial.
constexpr uint32_t crc32c_power(unsigned n) {
  uint32_t value = 0x80000000;
  for (; n > 0; --n) value = (value >> 1) ^ ((value & 1) != 0 ? kCrc32cPolynomial : 0);
  return value;
}

// Tables, eight bytes at a time ("slicing by 8", Kounavis and Berry 2005).
uint32_t crc32c_portable(uint32_t before, const std::byte* bytes, std::size_t count);

#if defined(__x86_64__)
// SSE4.2's instruction on three streams at a time: it takes three cycles, and one can begin in each.
uint32_t crc32c_sse42(uint32_t before, const std::byte* bytes, std::size_t count);
// 256 bytes at a time folded by VPCLMULQDQ on 512-bit registers ("Fast CRC computation using PCLMULQDQ", Intel 2009).
uint32_t crc32c_avx512(uint32_t before, const std::byte* bytes, std::size_t count);
#endif

}  // namespace ringdp::kernels
