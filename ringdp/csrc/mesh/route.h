// Route: the addresses of one peer, dialled one after the other with a short head start each, and the results; it
// decides when to give up. Bookkeeping only, time comes in from outside. Owned by a Dialing, used by its thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "mesh/addresses.h"

namespace ringdp {

class Route {
 public:
  enum class Verdict {
    kOpen,
    kRefused,     // a host answers, but nothing listens there: the process has gone, or a firewall refuses
    kUnreachable  // no host answers, or another process than the peer does
  };

  Route() = default;
  Route(Candidates candidates, Clock::time_point now);

  bool known() const { return known_; }
  std::optional<std::size_t> due(Clock::time_point now) const;  // the candidate to try now
  const SocketAddress& address(std::size_t index) const { return tries_[index].address; }
  std::vector<SocketAddress> addresses() const;

  void started(std::size_t index, Clock::time_point now);
  void answered(std::size_t index);  // connected: the process may be slow
  // `final`: a retry cannot succeed (another job, another rank).
  void failed(std::size_t index, const std::string& why, bool refused, bool final, Clock::time_point now);
  void restart(Clock::time_point now);
  void again(Clock::time_point now);  // the peer's connection has ended: it listened at one of these addresses
  bool was_connected() const { return was_connected_; }

  Verdict verdict(Clock::time_point now) const;
  std::string text(Clock::time_point now) const;  // "10.0.0.1:29600 (Connection refused), …"

 private:
  struct Try {
    SocketAddress address;
    Clock::time_point begin;  // not before
    bool running = false;
    bool answered = false;
    bool refused = false;  // the last time
    bool final = false;
    bool ended = false;  // the last time it had been connected
    int failures = 0;
    std::string why;
  };

  bool known_ = false;
  bool was_connected_ = false;
  std::optional<Clock::time_point> begin_;  // of the first try
  std::vector<Try> tries_;
  std::vector<std::string> left_out_;
};

}  // namespace ringdp
