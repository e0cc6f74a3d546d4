// LinkReceiver: the receiving half of a Link: it reads bytes from the channel and parses frames. A flow's payload goes
// straight from the channel into the operation's memory where the flow has room for it (`incoming`, `arrived`), else
// into `spare_`; a direct channel's frames are read where they lie (`take`). Owned by the Link, used by it on the
// thread that drives the engine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "link/connection.h"
#include "link/flow.h"
#include "link/frame.h"
#include "link/incoming_flows.h"
#include "link/link_sender.h"

namespace ringdp {

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

}  // namespace ringdp
