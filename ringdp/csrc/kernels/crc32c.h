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
