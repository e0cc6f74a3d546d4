// RendezvousWait: the deadline of the rendezvous, and the times of the log lines that name the missing ranks. Owned by
// a RendezvousRun and used by its thread.
#pragma once

#include <string>

#include "base/deadline.h"
#include "base/log.h"
#include "meet/rendezvous.h"

namespace ringdp {

class RendezvousWait {
 public:
  static constexpr int kPollMs = 50;                              // the interval of looking for signals
  static constexpr std::chrono::milliseconds kLongestPause{250};  // between two reads of the store

  explicit RendezvousWait(const RendezvousOptions& options)
      : rank_(options.rank),
        world_(options.world),
        timeout_ms_(options.timeout_ms),
        counts_anew_(options.absent_ms > 0),
        deadline_(Deadline::after_ms(counts_anew_ ? options.absent_ms : timeout_ms_)),
        notice_every_(options.first_notice_ms),
        notice_at_(begin_ + notice_every_) {}

  const Deadline& deadline() const { return deadline_; }
  Clock::duration waited() const { return Clock::now() - begin_; }

  bool all_came() const { return all_came_; }  // all records were read; only connections are missing
  void note_all_came() {
    if (!all_came_ && counts_anew_) deadline_ = Deadline::after_ms(timeout_ms_);
    all_came_ = true;
  }

  // At doubling intervals.
  bool notice_due() {
    if (Clock::now() < notice_at_) return false;
    notice_every_ *= 2;
    notice_at_ += notice_every_;
    return true;
  }
  void notice(const std::string& what) const {
    log(LogLevel::kWarning, "rank " + std::to_string(rank_) + " of " + std::to_string(world_) + " waits for " + what);
  }

 private:
  const int rank_;
  const int world_;
  const int64_t timeout_ms_;
  const bool counts_anew_;  // the deadline starts again once all have come
  const Clock::time_point begin_ = Clock::now();
  Deadline deadline_;
  std::chrono::milliseconds notice_every_;
  Clock::time_point notice_at_;
  bool all_came_ = false;
};

}  // namespace ringdp
