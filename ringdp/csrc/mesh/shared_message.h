// The messages between two ranks after the handshake and before the first frame: of one size, over their authenticated
// TCP connection and over the Unix socket that passes shared memory (docs/reference/wire_format.md). Encoding and
// checking only. Value types, any thread.
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
  kOffer = 1,     // from the maker of the memory: the name of its socket, and a token
  kToken = 2,     // at that socket: the token of the offer
  kMemory = 3,    // back over that socket; a descriptor comes along
  kAccepted = 4,  // the memory is mapped and will be used
  kRefused = 5,   // it will not be used: `reason`
  kReady = 6,     // this rank and those that report through it have finished the set-up (ReadyTree)
  kAllReady = 7,  // all ranks have
  kGaveUp = 8     // the sender leaves; only where the store cannot give the reason (GivenUp)
};

struct SharedMessage {
  SharedType type = SharedType::kRefused;
  uint64_t ring_bytes = 0;
  // The longest round trip between hosts: of those ranks (kReady), of all (kAllReady).
  int64_t round_trip_us = 0;
  SharedToken name{};  // of the FdSocket
  SharedToken token{};
  std::string reason = {};  // cut to what fits

  SharedBytes encode() const;
  static std::optional<SharedMessage> decode(const SharedBytes& raw);
};

// The error of a rank that left during the rendezvous, which the others raise too.
struct GivenUp {
  ErrorKind kind = ErrorKind::kHandshake;
  int peer = -1;     // the guilty rank; -1: the one that left
  std::string text;  // true on every rank; cut to what fits

  SharedMessage message() const;
  static std::optional<GivenUp> from(const SharedMessage& message);  // nullopt: it is another message
};

}  // namespace ringdp
