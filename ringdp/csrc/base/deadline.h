// Deadline: the point in time at which an operation times out. Value type, any thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace ringdp {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  static Deadline never() { return Deadline(Clock::time_point::max()); }
  static Deadline after_ms(int64_t timeout_ms, Clock::time_point now = Clock::now()) {
    // At most a year: adding more could overflow the clock.
    constexpr int64_t kYearMs = 365LL * 24 * 3600 * 1000;
    return timeout_ms >= kYearMs ? never() : Deadline(now + std::chrono::milliseconds(timeout_ms));
  }

  bool is_never() const { return at_ == Clock::time_point::max(); }
  bool expired() const { return at_ != Clock::time_point::max() && Clock::now() >= at_; }

  // Milliseconds left, rounded up, at most `cap_ms`: what poll(2) and epoll_wait(2) take.
  int remaining_ms(int cap_ms) const {
    if (at_ == Clock::time_point::max()) return cap_ms;
    auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, cap_ms));
  }

  Clock::time_point at() const { return at_; }
  friend bool operator<(const Deadline& a, const Deadline& b) { return a.at_ < b.at_; }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}

  Clock::time_point at_;
};

}  // namespace ringdp
