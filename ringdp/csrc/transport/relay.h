// Relay: moves bytes between pairs of connected sockets, as long as both ends of a pair live, in both directions and
// through the kernel alone (splice(2)). Invariant: a pair has one pipe each way. Where an end breaks, what it has said
// before still reaches the other one, within kLastMs. A host that is silent for too long ends its pairs. Owned by a
// launcher, which has one thread "relay" for all of its pairs; `join` and `counts` are for any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/inbox.h"
#include "transport/tcp_health.h"

namespace ringdp {

class Relay {
 public:
  static constexpr int64_t kSilenceMs = 8000;
  static constexpr int64_t kLastMs = 5000;

  struct Counts {
    std::size_t pairs = 0;  // now
    uint64_t bytes = 0;     // moved so far, both ways
  };

  Relay();
  ~Relay();  // ends all pairs
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // What comes on one is sent on the other from now on. Throws Error(kSystem) for want of descriptors.
  void join(Fd one, Fd other);
  Counts counts() const;

 private:
  struct Way {
    int from = -1, to = -1;
    Fd out{}, in{};          // the pipe's ends, to read and to write
    std::size_t held = 0;    // bytes in the pipe
    bool ended = false;      // `from` has no more bytes
    bool passed_on = false;  // `to` knows that
    bool broken = false;     // `from` has, and did not just end
    bool deaf = false;       // `to` takes nothing any more: what comes is thrown away, so that it is not reset
    void move(uint64_t& bytes, std::size_t& budget);
    bool over() const { return passed_on; }
  };
  struct Pair {
    Fd one, other;
    Way there, back;
    std::vector<TcpWatch> hosts{};               // of those ends that are not on this host
    bool waits = false;                          // has more to move
    std::optional<Clock::time_point> ends_at{};  // at the latest: an end has broken, and the other may have last words
  };

  void run();
  bool pump(Pair& pair);  // false: it is over
  void look_at_hosts();
  void drop(std::list<Pair>::iterator pair);

  Fd epoll_;
  std::list<Pair> pairs_;  // of the thread
  Clock::time_point looked_at_ = Clock::now();
  Inbox<Pair> coming_;
  std::atomic<std::size_t> count_{0};
  std::atomic<uint64_t> bytes_{0};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace ringdp
