// Stripe: a piece of a byte stream on one of several sockets (striped.h): a header of 16 bytes with its position in
// the stream, then its bytes. A stripe of length 0 marks the end of the stream. Value types, any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"

namespace ringdp {

struct Stripe {
  static constexpr std::size_t kHeadBytes = 16;
  static constexpr std::size_t kMostBytes = 64 * 1024;  // a longer one is not a stripe

  uint64_t offset = 0;
  uint32_t length = 0;

  uint64_t end() const { return offset + length; }

  void encode(std::byte* at) const {
    put(at, offset);
    put(at + 8, length);
    put(at + kCheckAt, check_of({at, kCheckAt}));
  }

  // nullopt: these bytes are not the header of a stripe.
  static std::optional<Stripe> decode(std::span<const std::byte, kHeadBytes> head) {
    if (take<uint32_t>(head.data() + kCheckAt) != check_of(head.first(kCheckAt))) return std::nullopt;
    const Stripe out{take<uint64_t>(head.data()), take<uint32_t>(head.data() + 8)};
    return out.length <= kMostBytes && out.offset < kNoEnd ? std::optional(out) : std::nullopt;
  }

 private:
  static constexpr std::size_t kCheckAt = 12;
  static constexpr uint64_t kNoEnd = uint64_t{1} << 62;

  // A check of the header, which the checksums of frames do not cover: a corrupted position would misplace bytes.
  static uint32_t check_of(std::span<const std::byte> bytes) { return static_cast<uint32_t>(hash_bytes(bytes)); }
};

}  // namespace ringdp
