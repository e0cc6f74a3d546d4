// SHA-256 (FIPS 180-4), HMAC-SHA256 (RFC 2104) and the small helpers the handshake needs with them.
// Stateless; any thread. Called by mesh (handshake) and by core_module.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ringdp {

inline constexpr std::size_t kSha256Bytes = 32;
using Digest = std::array<std::byte, kSha256Bytes>;

Digest sha256(std::span<const std::byte> data);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data);

// Takes the same time wherever the first difference is; the lengths are not secret.
bool equal_bytes(std::span<const std::byte> a, std::span<const std::byte> b);

// From the kernel's generator, getrandom(2); throws Error(kSystem).
void random_bytes(std::span<std::byte> out);

std::string hex_encode(std::span<const std::byte> data);   // lower case
std::vector<std::byte> hex_decode(std::string_view text);  // either case; throws Error(kValue)

}  // namespace ringdp
