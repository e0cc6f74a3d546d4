// Poller: waits until one of several descriptors can move bytes, until a time, or until another thread wakes it
// (epoll(7), eventfd(2), timerfd_create(2)). `wake` may be called from any thread, the rest by the thread that drives
// the engine.
#pragma once

#include <cstdint>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"

namespace ringdp {

class Poller {
 public:
  struct Event {
    uint32_t token;
    bool readable;
    bool writable;
  };

  Poller();

  void add(int fd, uint32_t token);       // readable only at first
  void add_bell(int fd, uint32_t token);  // edge-triggered: once for each write
  void want_write(int fd, uint32_t token, bool want);
  void remove(int fd);
  const std::vector<Event>& wait(int timeout_ms);  // -1: until something happens; EINTR ends it early
  void wake_at(Clock::time_point time);  // ends a `wait` then, once; finer than its milliseconds. The last call wins
  void wake();
  void close();  // no `wait` may follow; `wake` then does nothing

 private:
  Fd epoll_;
  Fd wakeup_;
  Fd timer_;  // made by the first wake_at
  std::vector<Event> events_;
};

}  // namespace ringdp
