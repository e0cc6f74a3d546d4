// Link: this rank's connection to one peer, both ways: it splits flows into frames and puts frames back into flows,
// compares the two sides' descriptions of each operation, and limits the payload that arrives early (flow control:
// docs/reference/wire_format.md). Owned by the engine; used only by the thread that drives it. Errors are thrown as
// Error naming the peer, and leave the link unusable.
//
// LinkRepair: replaces a broken connection. Until then its Link queues frames, as before its first connection. Each
// side says how many frames it has received; the other sends the rest again. Neither side may drop a sent frame before
// the peer has read it (not only its kernel acknowledged it): so `hold` on both sides comes before `settle` on either
// (meet/redialler.h). Owned by a Link, used by its owner on the thread that drives the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/fd.h"
#include "link/connection.h"
#include "link/flow.h"
#include "link/frame.h"
#include "link/incoming_flows.h"
#include "link/link_receiver.h"
#include "link/link_sender.h"

namespace ringdp {

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
