// TcpHealth: what the kernel's counters of a connection tell of the peer's host and of the path to it, whatever the
// peer's process does. Bookkeeping only: numbers and time come in from outside. Owned by a TcpWatch, used by its
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/deadline.h"
#include "transport/channel.h"

namespace ringdp {

// The shortest round trip of a connection so far, by the kernel: what a busy process adds does not count. 0: it does
// not know.
int64_t tcp_round_trip_us(int fd);

class TcpHealth {
 public:
  struct Counters {                   // of TCP_INFO, tcp(7)
    uint32_t unacknowledged = 0;      // packets under way
    uint32_t probes = 0;              // of keepalive or of a closed window, without an answer
    uint32_t retransmitted = 0;       // packets, ever
    uint32_t sent = 0;                // packets with data, ever
    uint32_t received = 0;            // packets, ever, those without data included
    uint32_t packet_bytes = 0;        // the most that one carries
    uint64_t acknowledged = 0;        // bytes, ever
    int64_t since_ack_ms = 0;         // since the peer's host last acknowledged anything
    std::size_t under_way_bytes = 0;  // in the packets under way
    std::size_t waiting_bytes = 0;    // to be sent
    std::size_t window_bytes = 0;     // that the peer has room for

    static std::optional<Counters> of(int fd);
    // Something should arrive. The first hop may drop a packet so that the kernel knows of it (an interface whose
    // other end has a smaller MTU): then nothing is under way, and it tries again and again.
    bool pending() const { return unacknowledged > 0 || refused(); }
    bool refused() const { return unacknowledged == 0 && waiting_bytes > 0 && window_bytes >= packet_bytes; }
  };

  static std::optional<Channel::Carried> carried(int fd);

  explicit TcpHealth(Clock::time_point now) : looked_at_(now), silent_since_(now), held_up_since_(now) {}

  void look(const Counters& counters, Clock::time_point now);
  void heard_elsewhere(Clock::time_point now);  // the host has answered, not on this connection
  void note_reset() { reset_ = true; }          // the host has ended the connection, which is an answer

  // How long the host has owed an acknowledgement and said nothing at all; 0: it owes none.
  int64_t silence_ms(Clock::time_point now) const;
  // How long nothing of what is under way has arrived, sent again several times, while the host answers otherwise: the
  // path loses it. 0 while that is not certain.
  int64_t held_up_ms(Clock::time_point now) const;
  std::size_t packet_bytes_under_way() const;  // at most
  bool doubtful(Clock::time_point now) const;  // whether the host answers would decide: ask it elsewhere

 private:
  void note_answer(Clock::time_point now);

  Counters last_;
  Clock::time_point looked_at_;
  Clock::time_point silent_since_;   // now, while it owes nothing
  Clock::time_point held_up_since_;  // now, while something arrives
  bool owed_ = false;
  bool reset_ = false;
  bool answers_ = false;  // since held_up_since_
  Clock::time_point answered_at_{};
  uint32_t sent_again_ = 0;         // packets, ever
  uint32_t sent_again_before_ = 0;  // when it answered first
};

}  // namespace ringdp
