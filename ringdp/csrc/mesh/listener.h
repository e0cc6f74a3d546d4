// Listener: this rank's listeners. It accepts a bounded number of connections at a time, detects a shortage of
// descriptors, counts refused connections, and logs at most a line a second. Owned by an Accepting, used by its thread.
#pragma once

#include <poll.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/tcp.h"

namespace ringdp {

class Listener {
 public:
  void listen_on(std::vector<TcpListener> listeners) { listeners_ = std::move(listeners); }
  bool listening() const { return !listeners_.empty(); }
  std::size_t size() const { return listeners_.size(); }
  bool paused() const { return Clock::now() < accept_after_; }  // for want of descriptors

  void poll_for(std::vector<pollfd>& polled) const;  // `size` of them
  // Accepts up to kAcceptsPerStep connections of the listener with that number, one at a call.
  void let_in(std::size_t listener, const std::function<void(Fd, const SocketAddress&)>& each);

  // A text if no connection could be accepted for seconds, because descriptors are short; else empty.
  std::string shortage() const;
  void turned_away() { ++turned_away_; }
  std::string turned_away_text() const;  // for the log; empty if no stranger came
  void report(const std::string& line);

 private:
  std::vector<TcpListener> listeners_;
  Clock::time_point accept_after_{};              // a pause, since descriptors have run out
  std::optional<Clock::time_point> short_since_;  // they have been short
  Clock::time_point short_last_{};
  std::string short_of_;
  Clock::time_point report_after_{};
  int unreported_ = 0;
  int turned_away_ = 0;
};

}  // namespace ringdp
