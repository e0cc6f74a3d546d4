// Frames cross a connection after the handshake: a fixed header and a payload (docs/reference/wire_format.md).
// Every header describes its sender's operation, so that a receiver in a different operation detects the disagreement.
// Value types, any thread.
//
// PeerState: a rank's answer to a peer that asks for the state of an operation (ping and pong,
// docs/reference/wire_format.md). The peer's engine answers, so the answer shows that the process lives even if its
// Python is stuck. Value type, any thread.
//
// FrameCheck: the checksums of the frames on one connection (docs/reference/wire_format.md, "Checksums"). A header has
// one of its own, which is compared before any field of it is used, so that no rank waits for the bytes of a damaged
// length. On a connection without checksums it adds no byte and computes nothing. Owned by a Link; used by the thread
// that drives the engine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "kernels/crc32c.h"

namespace ringdp {

inline constexpr std::size_t kPeerStateBytes = 3072;  // longest encoding

// A rank for which others wait, and why. `hops`: how many ranks forwarded the report; 0: the reporter found it itself.
struct MissingRank {
  int rank = -1;
  int hops = 0;
  std::string why;
};

struct PeerState {
  enum class Progress : uint8_t {
    kNoGroup = 0,    // it has not created the group yet, or has destroyed it
    kNotCalled = 1,  // it has not called this operation
    kQueued = 2,     // called; earlier operations of the group have their turn first
    kRunning = 3,    // under way
    kDone = 4,       // over
    kFailed = 5      // its group has failed
  };

  Progress progress = Progress::kNoGroup;
  int64_t since_call_ms = -1;  // since it last called any operation; -1: never
  // Ranks from which this or an earlier operation of the group needs bytes or room; the rank itself: it waits for its
  // own device.
  std::vector<int> waits_for;
  std::string name;       // what it calls the operation that was asked for; empty without a name
  std::string last;       // what it called last in that group; empty if nothing
  std::string elsewhere;  // what it has under way in another group; empty if nothing
  // Of an operation that it has not called: all threads of its program wait for this operation of another group, the
  // one in `elsewhere`; `needs_asker`: that operation cannot end before the rank that asks has called it.
  uint64_t blocked_group = 0;  // its number on the wire; 0: a thread may call
  uint64_t blocked_sequence = 0;
  bool needs_asker = false;
  std::vector<MissingRank>
      missing;  // the ranks at the end of its chain of waiting, for ranks that are not connected with them

  std::string encode() const;
  static PeerState decode(std::span<const std::byte> raw);  // throws Error(kHandshake) if it is too short
};

inline constexpr std::size_t kFrameHeaderBytes = 64;
inline constexpr std::size_t kSegmentBytes = 256 * 1024;       // longest payload of a data frame
inline constexpr std::size_t kEagerWindowBytes = 1024 * 1024;  // unasked-for payload a receiver stores per peer
inline constexpr std::size_t kSmallFlowBytes = 64 * 1024;      // flows up to this size are sent without being asked for
inline constexpr std::size_t kAbortTextBytes = 2048;           // longest text of an abort frame
inline constexpr std::size_t kReasonBytes = 512;               // longest text of a goodbye

// In an operation's sequence number: it is outside the order of its group, since it was issued inside a callback, or
// is a message.
inline constexpr uint64_t kCallbackBit = 1ULL << 63;
inline constexpr uint64_t kMessageBit = 1ULL << 62;

// `algorithm` of an operation whose bytes another backend moves, beside these connections: the ranks only announce
// that they begin it. `root` is the backend, as foreign_backend_number gives it.
inline constexpr uint8_t kElsewhere = 7;
int32_t foreign_backend_number(std::string_view name);  // 0 for one without a number of its own

// `offset` of a ping that asks for the stacks of the peer's process, and of the pong with their text.
inline constexpr uint64_t kWithStacks = 1;

// The offset of a credit that answers a goodbye: its sender has read everything, and reads nothing more.
inline constexpr uint64_t kByeRead = 1;

enum class FrameType : uint8_t {
  kData = 1,     // payload of a flow, in order; `offset` is its place in the flow
  kGrant = 2,    // receiver to sender: the flow may be sent up to `offset`
  kRequest = 3,  // sender to receiver: please grant, the eager window is used up
  kCredit = 4,   // carries nothing but `credit`, which every header has
  kAbort = 5,    // the group failed; payload is an AbortNotice
  kBye = 6,      // nothing follows: the sender leaves in good order; the payload says why
  kPing = 7,     // asks for the peer's state of an operation
  kPong = 8      // the answer: a PeerState, or the text of stacks
};

// The description of an operation by its rank. If the ranks' descriptions differ, the operation fails on all of them.
struct OperationShape {
  Collective what = Collective::kBarrier;
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  uint8_t algorithm = 0;
  int32_t root = -1;         // or the tag of a send, the codec of a compressed all-reduce, a foreign backend
  uint64_t count = 0;        // elements, of one rank's input
  uint32_t name_hash = 0;    // of the name given to it (bucket, `ringdp.named`); 0 for none
  uint64_t layout_hash = 0;  // of anything else that must agree (splits, parameter names); only in the fingerprint

  uint64_t fingerprint() const;
  std::string text() const;  // "all_reduce(float32[10], SUM)", "all_reduce(float32[10], AVG) by nccl"
};

struct FrameHeader {
  FrameType type = FrameType::kData;
  bool eager = false;   // the payload counts against the eager window
  uint32_t length = 0;  // payload bytes behind this header
  uint64_t group = 0;
  uint64_t sequence = 0;
  uint64_t offset = 0;
  uint64_t fingerprint = 0;
  OperationShape shape;  // without layout_hash
  uint32_t credit = 0;   // eager payload bytes the sender of this frame has used up, modulo 2^32

  static FrameHeader of(FrameType type, uint64_t group, uint64_t sequence, uint64_t offset = 0);  // of a control frame
  void encode(std::span<std::byte, kFrameHeaderBytes> out) const;
  // Throws Error(kHandshake) if it is not a header of this protocol.
  static FrameHeader decode(std::span<const std::byte, kFrameHeaderBytes> raw);
};

// Why a group failed, for its other members.
struct AbortNotice {
  ErrorKind kind = ErrorKind::kPeerLost;
  int32_t guilty_rank = -1;
  uint64_t sequence = 0;
  int32_t found_by = -1;     // the rank that found the failure
  bool unexplained = false;  // a connection ended, and the sender does not know why
  std::string text;

  std::string encode() const;
  static AbortNotice decode(std::span<const std::byte> raw);
};

inline constexpr std::size_t kFrameCheckBytes = 8;

class FrameCheck {
 public:
  explicit FrameCheck(bool on) : on_(on) {}

  bool on() const { return on_; }
  std::size_t head_bytes() const { return kFrameHeaderBytes + (on_ ? kFrameCheckBytes : 0); }

  // Sending: `head_bytes()` at `out`.
  void write_head(const FrameHeader& header, std::span<const std::byte> payload, std::byte* out) const;

  // Receiving: false if the `head_bytes()` at `head` are corrupted. Then its payload, part by part.
  bool accept_head(const std::byte* head);
  void add(std::span<const std::byte> part) {
    if (on_) found_ = crc32c(part, found_);
  }
  bool payload_is_whole() const { return found_ == sent_; }

 private:
  bool on_;
  uint32_t sent_ = 0;   // the payload's, as its header has it
  uint32_t found_ = 0;  // of the bytes of it that have come
};

}  // namespace ringdp
