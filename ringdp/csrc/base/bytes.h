// Little-endian numbers in byte strings, and the hash of fingerprints. Header only, any thread.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace ringdp {

static_assert(std::endian::native == std::endian::little,
              "the wire is little-endian and so are the hosts we build for");

template <typename T>
inline void put(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof(value));
}

template <typename T>
inline T take(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// FNV-1a, 64 bit (draft-eastlake-fnv-21), then the finaliser of SplitMix64 so that short inputs spread.
// It detects mistakes of honest ranks; it does not protect against an attacker, which the handshake does.
inline uint64_t hash_bytes(std::span<const std::byte> data, uint64_t seed = 0xcbf29ce484222325ULL) {
  uint64_t h = seed;
  for (std::byte b : data) h = (h ^ static_cast<uint64_t>(b)) * 0x100000001b3ULL;
  h ^= h >> 30;
  h *= 0xbf58476d1ce4e5b9ULL;
  h ^= h >> 27;
  h *= 0x94d049bb133111ebULL;
  return h ^ (h >> 31);
}

inline uint64_t hash_text(std::string_view text, uint64_t seed = 0xcbf29ce484222325ULL) {
  return hash_bytes(std::as_bytes(std::span(text.data(), text.size())), seed);
}

inline uint64_t hash_mix(uint64_t seed, uint64_t value) {
  std::byte raw[8];
  put(raw, value);
  return hash_bytes(raw, seed);
}

}  // namespace ringdp
