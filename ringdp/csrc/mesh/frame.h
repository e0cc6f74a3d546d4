// Frames cross a connection after the handshake: a fixed header and a payload (docs/reference/wire_format.md).
// Every header describes its sender's operation, so that a receiver in a different operation detects the disagreement.
// Value types, any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/types.h"

namespace ringdp {

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

}  // namespace ringdp
