#include "base/sha256.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace ringdp {
namespace {

constexpr std::size_t kBlockBytes = 64;

// First 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2).
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Sha256 {
 public:
  void update(std::span<const std::byte> data) {
    total_bytes_ += data.size();
    if (filled_ > 0) {
      const std::size_t taken = std::min(data.size(), kBlockBytes - filled_);
      append(data.first(taken));
      data = data.subspan(taken);
    }
    for (; data.size() >= kBlockBytes; data = data.subspan(kBlockBytes)) compress(data.data());
    append(data);
  }

  Digest finish() {
    const uint64_t total_bits = total_bytes_ * 8;
    const std::array<std::byte, 1> one = {std::byte{0x80}};
    append(one);
    if (filled_ > kBlockBytes - 8) pad_to(kBlockBytes);
    pad_to(kBlockBytes - 8);
    std::array<std::byte, 8> length;
    for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(total_bits >> (56 - 8 * i));
    append(length);
    Digest digest;
    for (std::size_t i = 0; i < digest.size(); ++i)
      digest[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
  }

 private:
  // At most to the end of the block.
  void append(std::span<const std::byte> data) {
    if (data.empty()) return;
    std::memcpy(block_.data() + filled_, data.data(), data.size());
    filled_ += data.size();
    if (filled_ == kBlockBytes) {
      compress(block_.data());
      filled_ = 0;
    }
  }

  void pad_to(std::size_t end) {
    static constexpr std::array<std::byte, kBlockBytes> zeros{};
    append(std::span(zeros).first(end - filled_));
  }

  void compress(const std::byte* block) {
    std::array<uint32_t, 64> w;
    for (std::size_t t = 0; t < 16; ++t) {
      w[t] = 0;
      for (std::size_t i = 0; i < 4; ++i) w[t] = w[t] << 8 | std::to_integer<uint32_t>(block[4 * t + i]);
    }
    for (std::size_t t = 16; t < 64; ++t) {
      const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
      const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t t = 0; t < 64; ++t) {
      const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t choice = (e & f) ^ (~e & g);
      const uint32_t t1 = h + sum1 + choice + kRound[t] + w[t];
      const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
      const uint32_t t2 = sum0 + majority;
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + t2;
    }
    const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state_[i] += added[i];
  }

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlockBytes> block_;
  std::size_t filled_ = 0;
  uint64_t total_bytes_ = 0;
};

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

Digest sha256(std::span<const std::byte> data) {
  Sha256 hash;
  hash.update(data);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data) {
  std::array<std::byte, kBlockBytes> padded{};
  if (key.size() > kBlockBytes) {
    const Digest short_key = sha256(key);
    std::memcpy(padded.data(), short_key.data(), short_key.size());
  } else if (!key.empty()) {
    std::memcpy(padded.data(), key.data(), key.size());
  }
  const auto keyed = [&padded](std::byte mask, std::span<const std::byte> text) {
    std::array<std::byte, kBlockBytes> pad;
    for (std::size_t i = 0; i < kBlockBytes; ++i) pad[i] = padded[i] ^ mask;
    Sha256 hash;
    hash.update(pad);
    hash.update(text);
    return hash.finish();
  };
  const Digest inner = keyed(std::byte{0x36}, data);
  return keyed(std::byte{0x5c}, inner);
}

bool equal_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;  // volatile: the compiler must not leave the loop early
  for (std::size_t i = 0; i < a.size(); ++i) difference = difference | std::to_integer<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

void random_bytes(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw_system("read random bytes from the kernel", errno);
    }
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

std::string hex_encode(std::span<const std::byte> data) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * data.size());
  for (const std::byte byte : data) {
    text.push_back(kDigits[std::to_integer<unsigned>(byte >> 4)]);
    text.push_back(kDigits[std::to_integer<unsigned>(byte & std::byte{15})]);
  }
  return text;
}

std::vector<std::byte> hex_decode(std::string_view text) {
  if (text.size() % 2 != 0)
    throw Error(ErrorKind::kValue,
                "hexadecimal text needs an even number of digits, got " + std::to_string(text.size()));
  std::vector<std::byte> data;
  data.reserve(text.size() / 2);
  for (std::size_t i = 0; i < text.size(); i += 2) {
    const int high = hex_value(text[i]);
    const int low = hex_value(text[i + 1]);
    // The text may be a secret: the message says where, never what.
    if (high < 0 || low < 0)
      throw Error(ErrorKind::kValue, "not a hexadecimal digit near position " + std::to_string(i));
    data.push_back(static_cast<std::byte>(high << 4 | low));
  }
  return data;
}

}  // namespace ringdp
