// The portable version of CRC32C, and the choice among those that this CPU has.
#include "kernels/crc32c.h"

#include <array>
#include <vector>

#include "base/bytes.h"

namespace ringdp {
namespace kernels {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b becomes with k bytes behind it.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kCrc32cPolynomial : 0);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < tables.size(); ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 255];
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32c_portable(uint32_t before, const std::byte* bytes, std::size_t count) {
  uint32_t crc = ~before;
  for (; count >= 8; bytes += 8, count -= 8) {
    const uint64_t word = take<uint64_t>(bytes) ^ crc;
    crc = 0;
    for (unsigned k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 255];
  }
  for (; count > 0; ++bytes, --count) crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<uint32_t>(*bytes)) & 255];
  return ~crc;
}

}  // namespace kernels

namespace {

std::vector<Crc32cVersion> find_versions() {
  std::vector<Crc32cVersion> found{{"portable", kernels::crc32c_portable}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    found.push_back({"sse4.2", kernels::crc32c_sse42});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
      found.push_back({"avx512", kernels::crc32c_avx512});
  }
#endif
  return found;
}

}  // namespace

std::span<const Crc32cVersion> crc32c_versions() {
  static const std::vector<Crc32cVersion> versions = find_versions();
  return versions;
}

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before) {
  static const auto run = crc32c_versions().back().run;
  return run(before, bytes.data(), bytes.size());
}

}  // namespace ringdp
