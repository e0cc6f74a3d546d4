// LinkSender: the sending half of a Link: control frames first, then the flows, oldest operation first, one frame at a
// time. Flows of bulk operations are sent when no other flow can be, in short frames, at the rate of a BulkRate, and
// few of their bytes are queued in the kernel. The SendWindow limits each flow: small messages need no round trip, and
// a slow rank holds large ones back. Owned by the Link, used by it and by its LinkReceiver, on the thread that drives
// the engine.
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "link/connection.h"
#include "link/flow.h"
#include "link/frame.h"
#include "link/resend_queue.h"
#include "link/send_window.h"

namespace ringdp {

class LinkSender {
 public:
  struct Events {
    std::function<void()> wanted;                  // called if a frame waits and there is no connection
    std::function<void(int error_number)> closed;  // the channel has ended
  };

  // `segment_bytes`: the longest payload of a frame, at most kSegmentBytes. `heals`: what was sent is kept until it has
  // arrived, unless the channel is direct.
  LinkSender(Connection& connection, Events events, std::size_t segment_bytes, bool heals)
      : connection_(connection), events_(std::move(events)), segment_bytes_(segment_bytes), heals_(heals) {}

  void opened(bool checksums);  // the connection has a channel
  void wish();                  // asks for a connection if there is none

  void interrupted();  // the channel was destroyed; its frames are kept
  // A new channel, to a peer that has received so many frames: the rest is sent again. False: they were dropped here.
  bool resumed(uint64_t taken);
  void note_received() { received_ = true; }  // a frame has come on this channel: the peer reads it

  void attach(SendFlow& flow);
  // The flow's operation has ended or failed: its memory is no longer read; a frame half sent is finished from a copy.
  void detach(SendFlow& flow);
  // This part of the operation's memory will be overwritten: frames that were sent from it are copied.
  void will_change(const SendFlow& flow, std::span<const std::byte> memory);
  SendWindow& window() { return window_; }

  void control(FrameHeader header, const std::string& payload = {});
  void say_bye(const std::string& reason);  // the last frame; it is kept until the peer has read it
  bool said_bye() const { return said_bye_; }
  void answer_bye();      // after the peer's goodbye was read: sent now or not at all
  bool may_talk() const;  // false: too many pings and pongs are queued

  // Called by the receiving half.
  bool grant(const FrameHeader& header);  // false: there is no such flow
  // Eager payload of the peer has left the window here; the next frame carries the credit, or a frame of its own once
  // half the window is due.
  void consumed(uint32_t bytes);

  bool pump();                                          // true if anything was sent
  bool blocked() const { return blocked_; }             // it lacked room at the last send
  bool held_back() const { return held_back_; }         // the rate limit refused the last send
  bool has_outgoing() const;                            // frames or sendable flows wait
  bool has_flows() const { return !sending_.empty(); }  // grants may come
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }  // any thread

 private:
  void look_what_arrived();
  void put(FrameHeader header, const std::string& payload);
  std::size_t pieces(std::array<iovec, 3>& out) const;  // of the frame under way what is not sent; how many there are
  bool stage_next();                                    // fills the outgoing frame; false if there is none
  bool frame_under_way() const { return head_sent_ < head_.size() || payload_sent_ < payload_.size() + padding_; }
  void finish_frame();

  Connection& connection_;
  const Events events_;
  FrameCheck check_{false};
  const std::size_t segment_bytes_;
  const bool heals_;
  std::optional<ResendQueue> kept_;
  uint64_t stream_sent_ = 0;  // bytes, on this channel
  bool received_ = true;
  bool wished_ = false;
  std::vector<std::pair<FrameHeader, std::string>> waiting_;  // control frames, for the next connection
  bool said_bye_ = false;

  // `head_` holds control frames and the header of the data frame whose payload is `payload_`.
  std::deque<SendFlow*> sending_;  // oldest operation first
  std::vector<std::byte> control_;
  std::vector<std::byte> head_;
  std::size_t head_sent_ = 0;
  std::span<const std::byte> payload_;
  std::size_t payload_sent_ = 0;  // with its padding
  std::size_t padding_ = 0;       // behind `payload_`, of a direct channel
  SendFlow* payload_flow_ = nullptr;
  bool unsent_is_limited_ = false;
  std::vector<std::byte> orphan_;  // owns `payload_` once its operation has ended
  bool blocked_ = false;
  bool held_back_ = false;

  SendWindow window_;
  uint32_t consumed_ = 0;  // eager bytes of the peer consumed here
  uint32_t consumed_reported_ = 0;

  std::atomic<uint64_t> bytes_sent_{0};
};

}  // namespace ringdp
