// A sending rate limit in software: RateLimiter counts for all channels of a process, LimitedChannel asks it before
// each send (kHeldBack). Receiving is not limited: the peers limit their sends. Used by the thread that drives the
// engine, which sleeps until `next` where a channel is held back.
//
// The first bytes of a list of pieces, for channels that send less than they are offered. Any thread.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "transport/channel.h"

namespace ringdp {

inline std::vector<iovec> first_bytes(std::span<const iovec> pieces, std::size_t bytes) {
  std::vector<iovec> out;
  for (iovec piece : pieces) {
    piece.iov_len = std::min(piece.iov_len, bytes);
    bytes -= piece.iov_len;
    if (piece.iov_len > 0) out.push_back(piece);
  }
  return out;
}

// A token bucket, stored as the time at which the line has carried all bytes so far. An idle line gains at most
// kBurst. A refused sender that retries late may catch up, by at most kLateness; otherwise every late wake-up would
// cost rate.
class RateLimiter {
 public:
  static constexpr auto kQuantum = std::chrono::microseconds(500);  // of the line's time, granted at once
  static constexpr auto kBurst = std::chrono::milliseconds(1);
  static constexpr auto kLateness = std::chrono::milliseconds(20);
  static constexpr std::size_t kLeastQuantumBytes = 2048;  // minimum on slow lines, for the cost of a system call

  explicit RateLimiter(int64_t bytes_per_s);

  std::size_t allowance(Clock::time_point now);  // bytes that may be sent at once; 0: none before `next`
  void spend(std::size_t bytes, Clock::time_point now);
  Clock::time_point next() const { return free_at_; }

 private:
  const double ns_per_byte_;
  const std::size_t quantum_bytes_;
  Clock::time_point free_at_{};
  bool refused_ = false;  // a sender waits for free_at_
};

class LimitedChannel final : public Channel {
 public:
  // The limiter outlives it. `inner` is not direct.
  LimitedChannel(std::unique_ptr<Channel> inner, RateLimiter& limiter) : inner_(std::move(inner)), limiter_(limiter) {}

  IoResult send(std::span<const iovec> pieces) override;
  IoResult receive(std::span<const iovec> pieces) override { return inner_->receive(pieces); }
  bool drained() override { return inner_->drained(); }
  void close_send() override { inner_->close_send(); }
  int poll_fd() const override { return inner_->poll_fd(); }
  std::string describe() const override { return inner_->describe(); }
  std::string why_ended() const override { return inner_->why_ended(); }
  NetworkPath* path() override { return inner_->path(); }

 private:
  std::unique_ptr<Channel> inner_;
  RateLimiter& limiter_;
};

}  // namespace ringdp
