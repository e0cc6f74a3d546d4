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
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "link/connection.h"
#include "link/flow.h"
#include "link/frame.h"
#include "link/resend_queue.h"

namespace ringdp {

// BulkRate: the rate of bulk flows on a long path, so that they use the free part of the line without filling a queue
// in which other flows would wait. It compares the round trip of the connection's packets with the shortest one: a
// longer one means that packets are queued (the idea of LEDBAT, RFC 6817). Owned by the SendWindow, used on the thread
// that drives the engine.
class BulkRate {
 public:
  // Of a connection, see NetworkPath::Carried.
  struct Sample {
    uint64_t carried_bytes = 0;  // so far
    int64_t round_trip_us = 0;
    int64_t least_round_trip_us = 0;
  };

  // The queueing delay, both ways: below it the rate rises, above it the rate falls.
  static constexpr int64_t kLittleQueueUs = 3000;
  static constexpr int64_t kMostQueueUs = 5500;

  // Of a frame: a longer one would itself delay other flows.
  std::size_t frame_bytes() const;

  BulkRate();

  // Whether the next bulk frame for that channel may be sent now, else it waits until `wakes_at`. With null the frame
  // is not bulk.
  bool admits(const NetworkPath* path);
  Clock::time_point wakes_at() const { return waits_ ? free_at_ : Clock::time_point::max(); }
  void sent(std::size_t bytes, Clock::time_point now);

  // The parts of `admits`. Whether a sample is due.
  bool wants_look(Clock::time_point now) const { return now >= next_look_; }
  void look(const Sample& sample, Clock::time_point now);

  bool may_send(Clock::time_point now) const { return !paced_ || now >= free_at_; }
  double bytes_per_s() const { return paced_ ? bytes_per_s_ : 0; }  // 0: any

 private:
  bool waits_ = false;
  bool paced_ = false;
  bool starting_ = true;
  int steps_ = 0;  // since packets waited
  double bytes_per_s_;
  double best_bytes_per_s_ = 0;  // that has arrived
  Clock::time_point free_at_{};
  Clock::time_point next_look_{};
  Clock::time_point looked_at_{};
  uint64_t carried_ = 0;
  uint64_t sent_ = 0;  // since the last look
};

// SendWindow: how many bytes the flows to one peer may send. A flow may send what the receiver has granted, and beyond
// that its first bytes (SendFlow::eager) while the peer's window has room. It keeps the grants for operations that
// have not started here yet. Owned by the LinkSender, used by it on the thread that drives the engine.
class SendWindow {
 public:
  // How many bytes beyond flow.sent may be sent now.
  std::size_t allowance(const SendFlow& flow) const;
  bool sendable(const SendFlow& flow) const;
  SendFlow* next_of(const std::deque<SendFlow*>& flows) const;  // the flow to send from next, or null
  // True if a small flow must ask for a grant, because the window is used up. It then waits for the grant, so none
  // comes too late.
  bool must_request(const SendFlow& flow) const;

  void sent_eagerly(std::size_t bytes) { eager_sent_ += static_cast<uint32_t>(bytes); }
  void credited(uint32_t credit) { eager_credited_ = credit; }
  // False: too many grants wait for their operations.
  bool keep_grant(const FrameHeader& header);
  void take_grant(SendFlow& flow);  // grants that came before the flow was attached
  void discard_group(uint64_t group);
  BulkRate& bulk_rate() { return bulk_rate_; }

 private:
  BulkRate bulk_rate_;
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> early_grants_;  // by group and sequence
  uint32_t eager_sent_ = 0;                                         // modulo 2^32, like the credits that answer it
  uint32_t eager_credited_ = 0;
};

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
