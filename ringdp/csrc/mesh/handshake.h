// The handshake of a connection: three messages of fixed size, authenticated both ways with the job's secret
// (docs/wire_format.md has them byte by byte). Encoding and checking only, no input or output. Value types, any thread.
//
//   connector                         acceptor
//   hello   (nonce c, MAC)      ->    silence unless the MAC is right
//                               <-    reply (nonce s, MAC over hello and reply), or a refusal
//   confirm (MAC over all)      ->    a replayed hello ends here
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/sha256.h"

namespace ringdp {

inline constexpr uint32_t kProtocolVersion = 4;
inline constexpr std::size_t kHandshakeBytes = 128;
inline constexpr std::size_t kNonceBytes = 24;
inline constexpr std::size_t kJobBytes = 16;

using HandshakeMessage = std::array<std::byte, kHandshakeBytes>;
using JobId = std::array<std::byte, kJobBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;

enum class HandshakeType : uint32_t { kHello = 1, kReply = 2, kRefusal = 3, kConfirm = 4 };

// Why an authenticated peer is turned away, as a number on the wire.
enum class Refusal : uint32_t { kNone = 0, kVersion = 1, kJob = 2, kEpoch = 3, kWorld = 4, kRank = 5, kDuplicate = 6 };

struct HandshakeFields {
  HandshakeType type = HandshakeType::kHello;
  uint32_t version = kProtocolVersion;
  JobId job{};
  uint32_t epoch = 0;
  uint32_t from = 0;
  uint32_t to = 0;
  uint32_t world = 0;
  Refusal refusal = Refusal::kNone;
  Nonce nonce{};
};

// `transcript`: the messages before this one, covered by its MAC too.
HandshakeMessage encode_handshake(const HandshakeFields& fields, std::span<const std::byte> secret,
                                  std::span<const std::byte> transcript);

// nullopt: wrong magic or wrong MAC, so nobody of ours.
std::optional<HandshakeFields> decode_handshake(const HandshakeMessage& message, std::span<const std::byte> secret,
                                                std::span<const std::byte> transcript);

// What an acceptor that believes `mine` (its own rank in `to`) says to an authentic hello.
Refusal judge_hello(const HandshakeFields& hello, const HandshakeFields& mine);

std::string refusal_text(Refusal refusal, const HandshakeFields& theirs, const HandshakeFields& mine);

}  // namespace ringdp
