// What two ranks tell each other between the handshake and the first frame: messages of one size, over their
// authenticated TCP connection and over the Unix socket that shared memory comes through
// (docs/reference/wire_format.md). Encoding and checking only. Value types, any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"

namespace ringdp {

inline constexpr std::size_t kSharedMessageBytes = 256;

using SharedToken = std::array<std::byte, 16>;
using SharedBytes = std::array<std::byte, kSharedMessageBytes>;

enum class SharedType : uint32_t {
  kOffer = 1,     // the maker: where it waits with the memory, and what to show there
  kToken = 2,     // at that socket: what the offer asks for
  kMemory = 3,    // back over that socket; a descriptor comes along
  kAccepted = 4,  // the memory is mapped and will be used
  kRefused = 5,   // it will not: `reason`
  kReady = 6,     // nothing is left to be set up on this rank and on those that report through it (ReadyTree)
  kAllReady = 7,  // nor on any rank
  kGaveUp = 8     // it leaves, and its connection ends; only where no store tells the others why (GivenUp)
};

struct SharedMessage {
  SharedType type = SharedType::kRefused;
  uint64_t ring_bytes = 0;
  // kReady: the longest between hosts that those ranks know of; kAllReady: that any rank does.
  int64_t round_trip_us = 0;
  SharedToken name{};  // of the FdSocket
  SharedToken token{};
  std::string reason = {};  // cut to what fits

  SharedBytes encode() const;
  static std::optional<SharedMessage> decode(const SharedBytes& raw);
};

// Why a rank left while the ranks met: its error, as the others raise it too.
struct GivenUp {
  ErrorKind kind = ErrorKind::kHandshake;
  int peer = -1;      // the guilty rank; -1: the one that left
  std::string story;  // true on every rank; cut to what fits

  SharedMessage message() const;
  static std::optional<GivenUp> from(const SharedMessage& message);  // nullopt: it is another message
};

}  // namespace ringdp
