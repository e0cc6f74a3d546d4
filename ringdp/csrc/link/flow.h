// Flows: the bytes one operation sends to, or expects from, one peer. An operation owns its flows and hands them to the
// peers' Links; Links call back through FlowHandler. Everything here happens on the thread that drives the engine.
//
// FlowCarrier: what operations ask of the links to their peers, which `peer` of a flow names. The engine's links carry
// flows over channels (engine/peer_links.h), a simulation's over a network in numbers (simulation/simulation.h). Used
// by the thread that drives the operations.
//
// FlowRecord: when the bytes of one flow moved, and how many. Written by the thread that drives the engine through the
// flow's link, read by any thread at any time: each value is atomic, and they are not of one moment. Owned by the
// OperationRecorder.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "base/deadline.h"
#include "link/frame.h"

namespace ringdp {

// Times of records: nanoseconds of the steady clock, which is CLOCK_MONOTONIC and so Python's time.monotonic_ns().
inline int64_t nanoseconds_of(Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

struct FlowRecord {
  std::atomic<int32_t> peer{-1};     // its place in the Runtime's world
  std::atomic<bool> sends{false};    // or receives
  std::atomic<int64_t> first_ns{0};  // the first byte came or went; of a flow without bytes its one frame; 0: not yet
  std::atomic<int64_t> last_ns{0};   // the last one so far
  std::atomic<uint64_t> moved{0};    // bytes
  std::atomic<uint64_t> total{0};
  std::atomic<int64_t> work_first_ns{
      0};  // work on its bytes began: encoding, adding, decoding, copying; 0: none was noted
  std::atomic<int64_t> work_last_ns{0};  // and ended so far
  std::atomic<int64_t> work_ns{0};       // spent on it, between these

  void begin(int to_or_from, bool sending, uint64_t bytes) {
    peer.store(to_or_from, std::memory_order_relaxed);
    sends.store(sending, std::memory_order_relaxed);
    first_ns.store(0, std::memory_order_relaxed);
    last_ns.store(0, std::memory_order_relaxed);
    moved.store(0, std::memory_order_relaxed);
    total.store(bytes, std::memory_order_relaxed);
    work_first_ns.store(0, std::memory_order_relaxed);
    work_last_ns.store(0, std::memory_order_relaxed);
    work_ns.store(0, std::memory_order_relaxed);
  }
  // A long frame begins: its bytes take a while.
  void note_begin() {
    if (first_ns.load(std::memory_order_relaxed) == 0)
      first_ns.store(nanoseconds_of(Clock::now()), std::memory_order_relaxed);
  }
  void note(uint64_t bytes_so_far) {
    const int64_t now = nanoseconds_of(Clock::now());
    if (first_ns.load(std::memory_order_relaxed) == 0) first_ns.store(now, std::memory_order_relaxed);
    last_ns.store(now, std::memory_order_relaxed);
    moved.store(bytes_so_far, std::memory_order_relaxed);
  }
  // Work on bytes of the flow that began at `begin_ns` and has ended now; a piece may take less than a microsecond. Not
  // recorded for few bytes, for which the clock would cost too much.
  void note_work(int64_t begin_ns) {
    const int64_t end_ns = nanoseconds_of(Clock::now());
    if (work_first_ns.load(std::memory_order_relaxed) == 0) work_first_ns.store(begin_ns, std::memory_order_relaxed);
    work_last_ns.store(end_ns, std::memory_order_relaxed);
    work_ns.store(work_ns.load(std::memory_order_relaxed) + end_ns - begin_ns, std::memory_order_relaxed);
  }

  static constexpr std::size_t kLeastWorkBytes = 16 * 1024;
};

struct PeerInfo;
class SendFlow;
class RecvFlow;

class FlowHandler {
 public:
  // The next bytes at `offset` of the flow: at most `max`, contiguous, whole elements, not beyond a block's end. They
  // do not change until `flushed` reports them as sent; those of a `lasting` flow longer.
  virtual std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) = 0;
  virtual void flushed(SendFlow& flow) = 0;  // flow.sent has grown
  // The memory for the bytes at `offset`: exactly `length` bytes, used until `arrived`. Empty: there is no such memory.
  virtual std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) = 0;
  virtual void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) = 0;
  // In place of these two for bytes that are in memory already, valid during the call only: whole elements, not beyond
  // a block's end. False: there is no memory for them.
  virtual bool take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) {
    return put(flow, offset, data, std::memcpy);
  }

 protected:
  // `copy(to, from, bytes)` copies them to the memory that `incoming` returned.
  template <class Copy>
  bool put(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data, Copy copy) {
    std::span<std::byte> room = incoming(flow, offset, data.size());
    if (room.size() != data.size()) return false;
    copy(room.data(), data.data(), data.size());
    arrived(flow, offset, room);
    return true;
  }

  ~FlowHandler() = default;
};

// What all flows of one operation have in common.
struct FlowIdentity {
  uint64_t group = 0;
  uint64_t sequence = 0;
  uint64_t fingerprint = 0;
  OperationShape shape;
  std::string name;            // whose hash is shape.name_hash
  std::string between = {};    // of a message: "from rank 1 to rank 2"
  bool bulk = false;           // of this rank alone: its flows give way to others on their links
  bool counts_differ = false;  // every pair of ranks has a count of its own: compared per flow, not in the fingerprint

  uint64_t elements(uint64_t bytes) const;
  std::string place() const;  // "#17", "in a callback", "from rank 1 to rank 2"
  std::string text() const;   // "all_reduce #17 (float32[10], SUM)"
};

// Two ranks disagree about one operation. The peer's name for it is not in its frames, only the name's hash.
struct Disagreement {
  FlowIdentity mine;
  FrameHeader theirs;
  int peer = -1;
  std::string beside = {};  // another fact that may explain it; empty: none

  bool name_unknown() const;  // the peer's operation has a name, and it is not this rank's
  Error explain(const PeerInfo& self, const PeerInfo& peer_info, const std::string& peer_name) const;
};

// To one peer. Invariant: sent <= ready <= total.
class SendFlow {
 public:
  FlowHandler* handler = nullptr;
  const FlowIdentity* identity = nullptr;
  int peer = -1;         // position of the peer in the Runtime's world
  int member = -1;       // its rank in the group
  uint64_t total = 0;    // bytes in all
  uint64_t ready = 0;    // bytes that the operation has ready to send
  uint64_t sent = 0;     // bytes handed to the transport
  uint64_t granted = 0;  // bytes the receiver has granted; more go eagerly while there is room
  // So many of its first bytes are sent without a grant. Below `total` if that is above kSmallFlowBytes, so that the
  // last grant comes before the flow ends.
  uint64_t eager = kSmallFlowBytes;
  bool opened = false;  // its first frame is out (a flow of no bytes has one frame too)
  bool requested = false;
  bool encodes = false;  // `outgoing` computes its bytes
  // Until the operation ends, bytes that were sent are overwritten only by results that depend on the peer's having
  // received them, or after a call of Link::will_change.
  bool lasting = false;
  FlowRecord* record = nullptr;  // when its bytes went; may be null

  bool complete() const { return opened && sent == total; }
};

// From one peer: received <= total, and no more is granted than the operation can take.
class RecvFlow {
 public:
  FlowHandler* handler = nullptr;
  const FlowIdentity* identity = nullptr;
  int peer = -1;
  int member = -1;
  uint64_t total = 0;
  uint64_t received = 0;
  uint64_t window = 0;   // how many bytes the operation can take by now (total if it never holds the peer back)
  uint64_t granted = 0;  // bytes granted to the peer
  bool opened = false;
  bool decodes = false;          // `arrived` computes much with the last bytes of a piece, which may be few
  FlowRecord* record = nullptr;  // when its bytes came; may be null

  bool complete() const { return opened && received == total; }
  // Records work on these bytes; null: it is not recorded.
  FlowRecord* work_record(std::size_t bytes) const {
    return decodes || bytes >= FlowRecord::kLeastWorkBytes ? record : nullptr;
  }
};

class FlowCarrier {
 public:
  virtual void attach(SendFlow& flow) = 0;
  virtual void attach(RecvFlow& flow) = 0;  // may call the flow's handler, and throw Error(kMismatch)
  virtual void detach(SendFlow& flow) = 0;  // its operation has ended, or fails
  virtual void detach(RecvFlow& flow) = 0;
  virtual void widen(RecvFlow& flow) = 0;  // its window has grown
  // This part of the memory from which the flow was sent will be overwritten.
  virtual void will_change(const SendFlow& flow, std::span<const std::byte> memory) = 0;
  // Sends an empty frame, by which the peer can compare both descriptions.
  virtual void announce(int peer, const FlowIdentity& identity) = 0;
  virtual std::string peer_text(int peer) const = 0;  // "rank 3 (host node7, pid 4711)"

 protected:
  ~FlowCarrier() = default;
};

}  // namespace ringdp
