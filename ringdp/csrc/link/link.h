// Link: this rank's connection to one peer, both ways: it splits flows into frames and puts frames back into flows,
// compares the two sides' descriptions of each operation, and limits the payload that arrives early (flow control:
// docs/reference/wire_format.md). Owned by the engine; used only by the thread that drives it. Errors are thrown as
// Error naming the peer, and leave the link unusable.
// Its receiving half is here too, and its repair; the sending half: link_sender.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"
#include "link/connection.h"
#include "link/flow.h"
#include "link/frame.h"
#include "link/incoming_flows.h"
#include "link/link_sender.h"

namespace ringdp {

// LinkReceiver: the receiving half of a Link: it reads bytes from the channel and parses frames. A flow's payload goes
// straight from the channel into the operation's memory where the flow has room for it (`incoming`, `arrived`), else
// into `spare_`; a direct channel's frames are read where they lie (`take`). Owned by the Link, used by it on the
// thread that drives the engine.
class LinkReceiver {
 public:
  LinkReceiver(Connection& connection, LinkSender& sender, IncomingFlows& flows, const LinkEvents& events)
      : connection_(connection), sender_(sender), flows_(flows), events_(events) {}

  void opened(bool checksums);                 // the connection has a channel
  void interrupted();                          // its channel was destroyed: an incomplete frame will be sent again
  uint64_t frames() const { return frames_; }  // that have come whole, on a channel that is not direct
  void detach(RecvFlow& flow);                 // its memory may be freed: the rest of a payload is dropped

  bool pump(std::size_t budget_bytes);  // true if anything was received
  // The channel has ended; `error_number` 0: the stream ended in order, but without a goodbye. Throws the reason,
  // unless the peer may have left in good order.
  void on_closed(int error_number);
  uint64_t bytes_received() const { return bytes_received_.load(std::memory_order_relaxed); }  // any thread

 private:
  bool pump_stream(std::size_t budget_bytes);
  bool take_from_stage();  // false: more bytes are needed
  bool pump_direct(std::size_t budget_bytes);
  std::size_t take_direct(std::span<const std::byte> bytes);  // how many it has consumed
  bool throw_away();                                          // drops the bytes that come on a damaged link

  void begin_frame(const std::byte* head);
  void begin_data(const FrameHeader& header);
  void finish_payload();
  void finish_control(const FrameHeader& header, std::span<const std::byte> payload);

  Connection& connection_;
  LinkSender& sender_;
  IncomingFlows& flows_;
  const LinkEvents& events_;
  FrameCheck check_{false};
  std::vector<std::byte> stage_;  // read-ahead; [stage_begin_, stage_end_) is unread
  std::size_t stage_begin_ = 0;
  std::size_t stage_end_ = 0;
  std::optional<FrameHeader> current_;  // the frame whose payload is arriving
  std::span<std::byte> target_;
  std::size_t target_filled_ = 0;
  RecvFlow* target_flow_ = nullptr;
  std::vector<std::byte> spare_;  // target of payloads without a flow
  bool dropping_ = false;         // the payload is discarded
  uint64_t frames_ = 0;
  std::atomic<uint64_t> bytes_received_{0};
};

// LinkRepair: replaces a broken connection. Until then its Link queues frames, as before its first connection. Each
// side says how many frames it has received; the other sends the rest again. Neither side may drop a sent frame before
// the peer has read it (not only its kernel acknowledged it): so `hold` on both sides comes before `settle` on either
// (meet/redialler.h). Owned by a Link, used by its owner on the thread that drives the engine.
class LinkRepair {
 public:
  LinkRepair(Connection& connection, LinkSender& sender, LinkReceiver& receiver, bool on)
      : connection_(connection), sender_(sender), receiver_(receiver), on_(on) {}

  // Whether its connection is replaced when it breaks. Shared memory does not break.
  bool possible() const {
    return on_ && connection_.usable() && (connection_.connected() || connection_.healing()) &&
           connection_.direct() == nullptr;
  }
  void hold() { connection_.hold(); }  // from now on this channel sends nothing, and no sent frame is dropped
  // closes the sending side: the peer sees the end, and what it still sends is read
  void stop_sending();
  void drain();      // reads what has come on it; throws ConnectionBroken if it had ended
  void interrupt();  // destroys the channel
  uint64_t frames_taken() const { return receiver_.frames(); }
  // To a peer that has received `taken` frames. False: a frame that it lacks was dropped here.
  bool resume(std::unique_ptr<Channel> channel, uint64_t taken);
  void add_stream(Fd socket);  // to the channel of `resume`, if that is intact

 private:
  Connection& connection_;
  LinkSender& sender_;
  LinkReceiver& receiver_;
  const bool on_;
};

class Link : public Connection {
 public:
  // `checksums`: the same on the peer's side; a direct channel has none. Without a channel the link queues what it
  // sends, and its first frame asks for the connection. `segment_bytes`: the longest payload of a frame sent. `heals`:
  // a broken connection is replaced (`repair`).
  Link(PeerInfo self, PeerInfo peer, std::unique_ptr<Channel> channel, const LinkEvents& events, bool checksums = false,
       std::size_t segment_bytes = kSegmentBytes, bool heals = false);

  void connect(std::unique_ptr<Channel> channel, bool checksums);  // once
  LinkRepair& repair() { return repair_; }

  void attach(SendFlow& flow) { sender_.attach(flow); }
  void attach(RecvFlow& flow) { incoming_.attach(flow); }  // processes early frames; may throw Error(kMismatch)
  void detach(SendFlow& flow) { sender_.detach(flow); }    // its operation has ended, or fails
  void detach(RecvFlow& flow);
  void will_change(const SendFlow& flow, std::span<const std::byte> memory) { sender_.will_change(flow, memory); }

  // For an operation that only receives from the peer: sends an empty frame, by which the peer can compare both
  // descriptions.
  void announce(const FlowIdentity& identity);
  IncomingFlows& incoming() { return incoming_; }
  void discard_group(uint64_t group);  // the group has failed or was destroyed: its later frames are dropped

  void send_abort(uint64_t group, const AbortNotice& notice);
  void send_bye(const std::string& reason);
  void send_ping(uint64_t group, uint64_t sequence, bool with_stacks = false);
  // `answer`: an encoded PeerState, or the text of stacks, kStacksBytes at most.
  void send_pong(uint64_t group, uint64_t sequence, const std::string& answer, bool stacks = false);

  // Send and receive what can be moved now; true if a byte was. `pump_receive` reads about `budget_bytes` at most.
  bool pump_send() { return sender_.pump(); }
  bool pump_receive(std::size_t budget_bytes) { return receiver_.pump(budget_bytes); }

  bool wants_write() const { return sender_.blocked() && !healing(); }               // it is full: poll for room
  bool held_back() const { return has_outgoing() && sender_.held_back(); }           // do not poll: retry after a delay
  Clock::time_point next_bulk() { return sender_.window().bulk_rate().wakes_at(); }  // when a frame may go that waits
  bool has_outgoing() const { return sender_.has_outgoing(); }                       // frames or sendable flows wait
  bool expects() const { return incoming_.any() || sender_.has_flows(); }            // bytes, or grants

  struct Traffic {
    uint64_t sent = 0, received = 0;  // bytes, headers included
  };
  Traffic traffic() const { return {sender_.bytes_sent(), receiver_.bytes_received()}; }  // any thread

 private:
  void on_send_failed(int error_number);

  const LinkEvents events_;
  LinkSender sender_;
  IncomingFlows incoming_;
  LinkReceiver receiver_;
  LinkRepair repair_;
};

}  // namespace ringdp
