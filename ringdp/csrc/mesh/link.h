// Link: this rank's connection to one peer, both ways: it splits flows into frames and puts frames back into flows,
// compares the two sides' descriptions of each operation, and limits the payload that arrives early (flow control:
// docs/reference/wire_format.md). Owned by the engine; used only by the thread that drives it. Errors are thrown as
// Error naming the peer, and leave the link unusable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "mesh/connection.h"
#include "mesh/flow.h"
#include "mesh/frame.h"
#include "mesh/incoming_flows.h"
#include "mesh/link_events.h"
#include "mesh/link_receiver.h"
#include "mesh/link_repair.h"
#include "mesh/link_sender.h"
#include "mesh/peer_state.h"

namespace ringdp {

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

  bool wants_write() const {  // it is full: poll for room
    return sender_.blocked() && !healing() && !channel().held_back();
  }
  bool held_back() const { return has_outgoing() && channel().held_back(); }         // do not poll: retry after a delay
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
