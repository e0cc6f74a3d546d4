// CRC32C: RFC 3720's examples, and every version against one bit at a time for all lengths, places in memory and cuts.
#include <random>
#include <string>
#include <vector>

#include "kernels/crc32c.h"
#include "testing.h"

namespace ringdp {
namespace {

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

uint32_t by_bits(std::span<const std::byte> data, uint32_t before = 0) {
  uint32_t crc = ~before;
  for (std::byte it : data) {
    crc ^= std::to_integer<uint32_t>(it);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

std::vector<std::byte> noise(std::size_t count) {
  std::mt19937_64 random(17);
  std::vector<std::byte> out(count);
  for (std::byte& it : out) it = static_cast<std::byte>(random());
  return out;
}

uint32_t run(const Crc32cVersion& version, std::span<const std::byte> data, uint32_t before = 0) {
  return version.run(before, data.data(), data.size());
}

void check(const Crc32cVersion& version, std::span<const std::byte> data, uint32_t wanted, const std::string& where) {
  if (const uint32_t got = run(version, data); got != wanted)
    testing::report_failure(__FILE__, __LINE__,
                            std::string(version.name) + " gives " + std::to_string(got) + ", not " +
                                std::to_string(wanted) + ", for " + where);
}

CASE("CRC32C gives RFC 3720's examples") {
  std::string up, down;
  for (char i = 0; i < 32; ++i) up += i, down += static_cast<char>(31 - i);
  for (const Crc32cVersion& version : crc32c_versions()) {
    CHECK_EQ(run(version, bytes(std::string(32, '\0'))), 0x8A9136AAU);
    CHECK_EQ(run(version, bytes(std::string(32, '\xff'))), 0x62A8AB43U);
    CHECK_EQ(run(version, bytes(up)), 0x46DD794EU);
    CHECK_EQ(run(version, bytes(down)), 0x113FDB5CU);
    CHECK_EQ(run(version, bytes("123456789")), 0xE3069283U);
    CHECK_EQ(run(version, {}), 0U);
  }
  CHECK_EQ(crc32c(bytes("123456789")), 0xE3069283U);
}

CASE("every version agrees with one bit at a time, for all lengths and places in memory") {
  const auto data = noise(1400);
  for (std::size_t begin : {0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 31, 63})
    for (std::size_t count = 0; begin + count <= data.size(); count += begin == 0 ? 1 : 7) {
      const auto part = std::span(data).subspan(begin, count);
      const uint32_t wanted = by_bits(part);
      for (const Crc32cVersion& version : crc32c_versions())
        check(version, part, wanted, std::to_string(count) + " bytes at " + std::to_string(begin));
    }
}

CASE("every version agrees on long payloads, around the lengths of its loops") {
  const auto data = noise(256 * 1024 + 64);
  for (std::size_t around : {384, 512, 768, 6144, 12288, 65536, 200'000, 256 * 1024})
    for (std::size_t count : {around - 9, around - 8, around - 1, around, around + 1, around + 8, around + 63}) {
      const auto part = std::span(data).subspan(1, count);
      const uint32_t wanted = by_bits(part);
      for (const Crc32cVersion& version : crc32c_versions()) check(version, part, wanted, std::to_string(count));
    }
}

CASE("bytes in two parts give the value of the whole, wherever they are cut") {
  const auto data = noise(1300);
  const uint32_t whole = by_bits(data);
  for (const Crc32cVersion& version : crc32c_versions())
    for (std::size_t cut = 0; cut <= data.size(); ++cut) {
      const uint32_t first = run(version, std::span(data).first(cut));
      if (run(version, std::span(data).subspan(cut), first) != whole)
        testing::report_failure(__FILE__, __LINE__, std::string(version.name) + " cut at " + std::to_string(cut));
    }
}

CASE("no flipped bit leaves the value as it was") {
  auto data = noise(600);
  const uint32_t whole = crc32c(data);
  for (std::size_t bit = 0; bit < 8 * data.size(); ++bit) {
    data[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK(crc32c(data) != whole);
    data[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

}  // namespace
}  // namespace ringdp
