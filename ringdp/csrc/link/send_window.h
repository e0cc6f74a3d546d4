// SendWindow: how many bytes the flows to one peer may send. A flow may send what the receiver has granted, and beyond
// that its first bytes (SendFlow::eager) while the peer's window has room. It keeps the grants for operations that
// have not started here yet. Owned by the LinkSender, used by it on the thread that drives the engine.
//
// BulkRate: the rate of bulk flows on a long path, so that they use the free part of the line without filling a queue
// in which other flows would wait. It compares the round trip of the connection's packets with the shortest one: a
// longer one means that packets are queued (the idea of LEDBAT, RFC 6817). Owned by the SendWindow, used on the thread
// that drives the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include "base/deadline.h"
#include "link/flow.h"
#include "link/frame.h"

namespace ringdp {

class NetworkPath;

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

}  // namespace ringdp
