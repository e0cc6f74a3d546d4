// BulkRate: how fast bulk flows go on a long path, so that they fill what is left of the line and no queue before it:
// what comes behind them would wait there. It looks at the round trip of the connection's packets: longer than at its
// shortest means that packets wait somewhere (LEDBAT, RFC 6817, has the idea). Owned by the SendWindow, used on the
// thread that drives the engine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/deadline.h"

namespace ringdp {

class Channel;

class BulkRate {
 public:
  // Of a connection, see Channel::Carried.
  struct Sample {
    uint64_t carried_bytes = 0;  // so far
    int64_t round_trip_us = 0;
    int64_t least_round_trip_us = 0;
  };

  // As far as the path's round trip shows that packets wait on it, both ways: less, it may go faster; more, slower.
  static constexpr int64_t kLittleQueueUs = 3000;
  static constexpr int64_t kMostQueueUs = 5500;

  // Of a frame: longer ones would be in the way themselves.
  std::size_t frame_bytes() const;

  BulkRate();

  // The next frame is one of bulk for that channel (null: it is none): whether it may go now. Otherwise it waits until
  // `wakes_at`.
  bool admits(const Channel* channel);
  Clock::time_point wakes_at() const { return waits_ ? free_at_ : Clock::time_point::max(); }
  void sent(std::size_t bytes, Clock::time_point now);

  // What `admits` is made of.
  // A sample would be of use now.
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

}  // namespace ringdp
