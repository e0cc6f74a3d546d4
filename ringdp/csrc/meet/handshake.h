// The handshake of a connection: three messages of fixed size, authenticated both ways with the job's secret
// (docs/reference/wire_format.md has them byte by byte). Encoding and checking only, no input or output. Value types,
// any thread.
//
//   connector                         acceptor
//   hello   (nonce c, MAC)      ->    silence unless the MAC is right
//                               <-    reply (nonce s, MAC over hello and reply), or a refusal
//                               <-    padding: one packet as large as the connection's packets get
//   confirm (MAC over all)      ->    a replayed hello ends here
//   padding                     ->
//
// On a connection that replaces a broken one, each side then says how many frames it has received:
//
//                               <-    resume (frames the acceptor has taken, MAC over all)
//   resume (connector's)        ->
//
// Always the higher rank of a pair connects. A lower one that needs a connection asks for it: it connects, sends a
// knock with a MAC, and closes. A check ends before the confirm.
//
// HandshakeSocket: a connection during its handshake. Reads and writes whole messages, with their padding; the MAC of
// each covers those before it. Its owner, a HandshakeAttempt, interprets them. Nothing blocks. Used by its owner's
// thread.
//
// The padding of a handshake: a packet each way, as large as the connection sends them, by which ranks learn whether
// the path between them passes such packets. Used by a HandshakeAttempt, on its thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/sha256.h"
#include "transport/tls.h"

namespace ringdp {

inline constexpr uint32_t kProtocolVersion = 10;
inline constexpr std::size_t kHandshakeBytes = 128;
inline constexpr std::size_t kMaxPaddingBytes = 9216;  // with jumbo frames a packet carries 8,948 bytes
inline constexpr std::size_t kNonceBytes = 24;
inline constexpr std::size_t kJobBytes = 16;

using HandshakeMessage = std::array<std::byte, kHandshakeBytes>;
using JobId = std::array<std::byte, kJobBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;

enum class HandshakeType : uint32_t { kHello = 1, kReply = 2, kRefusal = 3, kConfirm = 4, kKnock = 5, kResume = 6 };

// What a connection is for: the first one of a pair, another one in place of one that has broken, or a launcher's with
// the door of its job (ringdp/launcher/door).
enum class Purpose : uint8_t { kMeet = 0, kResume = 1, kDoor = 2 };

// Why an authenticated peer is turned away, as a number on the wire.
enum class Refusal : uint32_t {
  kNone = 0,
  kVersion = 1,
  kJob = 2,
  kEpoch = 3,
  kWorld = 4,
  kRank = 5,
  kDuplicate = 6,
  kGone = 7,
  kTls = 8
};

struct HandshakeFields {
  HandshakeType type = HandshakeType::kHello;
  uint32_t version = kProtocolVersion;
  JobId job{};
  uint32_t epoch = 0;
  uint32_t from = 0;
  uint32_t to = 0;
  uint32_t world = 0;
  Refusal refusal = Refusal::kNone;
  uint32_t padding = 0;  // bytes that follow the message; their values do not matter, only their arrival does
  uint16_t stream = 0;   // which of the pair's connections this is to be; 0: the first
  uint16_t streams = 1;  // confirm of the first: how many there are to be
  Nonce nonce{};
  Purpose purpose = Purpose::kMeet;
  // Of a knock: its connection stays, and the higher rank says hello on it: it need not be able to connect itself.
  bool turned = false;
  uint8_t met = 0;  // not 0: the sender knows that all ranks are connected, and their longest round trip, see met_with
  TlsMode tls = TlsMode::kPlain;  // of the connection, after the handshake
  // The number of the pair's connection, counted for those of the start and for those of kResume separately. In resume
  // messages: the number of frames received.
  uint64_t number = 0;
};

// HandshakeFields::met of a rank that is connected with all others, and its content.
uint8_t met_with(int64_t round_trip_us);  // 0 or a power of two
int64_t round_trip_in(uint8_t met);

// `transcript`: the messages before this one, covered by its MAC too.
HandshakeMessage encode_handshake(const HandshakeFields& fields, std::span<const std::byte> secret,
                                  std::span<const std::byte> transcript);

// nullopt: wrong magic or wrong MAC, so not a rank of this job.
std::optional<HandshakeFields> decode_handshake(const HandshakeMessage& message, std::span<const std::byte> secret,
                                                std::span<const std::byte> transcript);

// An acceptor's verdict on an authentic hello, where its own fields are `mine` (its own rank in `to`).
Refusal judge_hello(const HandshakeFields& hello, const HandshakeFields& mine);

std::string refusal_text(Refusal refusal, const HandshakeFields& theirs, const HandshakeFields& mine);

class HandshakeSocket {
 public:
  explicit HandshakeSocket(Fd socket = Fd()) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  Fd take() { return std::move(socket_); }  // it is connected
  // Of this connection alone: from the messages so far, which the other side has too.
  Digest key(std::span<const std::byte> secret) const;
  void close() { socket_.reset(); }

  enum class Read { kWaits, kDone, kEnded };  // for more; all is here; see `why`
  Read read_message();                        // no more than that: frames follow the last
  Read read_padding();
  bool begun() const { return filled_ > 0; }  // a message has come in part

  // The message that was read; nullopt: its MAC is wrong. After `add_to_transcript` the MACs of later messages cover
  // it.
  std::optional<HandshakeFields> decode(std::span<const std::byte> secret) const;
  void add_to_transcript();

  bool announced(std::size_t bytes);  // of padding that comes next; false: more than there may be
  std::size_t padding() const { return padding_; }

  bool send(const HandshakeFields& fields, std::span<const std::byte> secret);  // false: see `why`
  bool send_first(std::span<const std::byte> greeting);                         // for who relays the connection

  int error_number() const { return error_number_; }  // 0: it was closed
  std::string why() const;

 private:
  Read received(ssize_t got);

  Fd socket_;
  HandshakeMessage buffer_{};
  std::size_t filled_ = 0;
  std::size_t padding_ = 0;
  std::size_t padding_left_ = 0;
  std::vector<std::byte> transcript_;
  int error_number_ = 0;
};

uint32_t padding_for(int fd);   // its bytes on a connected socket; 0 inside a host
int64_t padding_patience_ms();  // how long it may take

}  // namespace ringdp
