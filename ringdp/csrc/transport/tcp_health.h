// What the kernel's counters say of a TCP connection (TCP_INFO): whether the peer's host answers, whether bytes arrive,
// and which setting makes it slow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/channel.h"
#include "transport/tcp.h"

namespace ringdp {

// The shortest round trip of a connection so far, measured by the kernel, so without the delays of a busy process. 0:
// unknown.
int64_t tcp_round_trip_us(int fd);

// TcpHealth: judges from the kernel's counters of a connection whether the peer's host answers and whether the path
// delivers, independently of the peer's process. Bookkeeping only: numbers and time come in from outside. Owned by a
// TcpWatch, used by its thread.
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
    // Whether bytes should arrive. If the first hop drops a packet and the kernel knows it (an interface whose other
    // end has a smaller MTU), no bytes are in flight, but the kernel retries.
    bool pending() const { return unacknowledged > 0 || refused(); }
    bool refused() const { return unacknowledged == 0 && waiting_bytes > 0 && window_bytes >= packet_bytes; }
  };

  static std::optional<NetworkPath::Carried> carried(int fd);

  explicit TcpHealth(Clock::time_point now) : looked_at_(now), silent_since_(now), held_up_since_(now) {}

  void look(const Counters& counters, Clock::time_point now);
  void answered_elsewhere(Clock::time_point now);  // the host has answered on another connection
  void note_reset(Clock::time_point now);          // a reset by the host, which is an answer

  // For how long an acknowledgement is overdue and no packet has come; 0: none is overdue.
  int64_t silence_ms(Clock::time_point now) const;
  // For how long no byte in flight has arrived, after several retransmissions, while the host answers: the path loses
  // them. 0 while that is not certain.
  int64_t held_up_ms(Clock::time_point now) const;
  std::size_t packet_bytes_under_way() const;  // at most
  bool doubtful(Clock::time_point now) const;  // an answer of the host would decide: ask it on another connection

 private:
  void note_answer(Clock::time_point now);

  Counters last_;
  Clock::time_point looked_at_;
  Clock::time_point silent_since_;   // the present time while no acknowledgement is overdue
  Clock::time_point held_up_since_;  // the present time while bytes arrive
  bool unacknowledged_ = false;
  bool reset_ = false;
  bool answers_ = false;  // since held_up_since_
  Clock::time_point answered_at_{};
  uint32_t sent_again_ = 0;         // packets, ever
  uint32_t sent_again_before_ = 0;  // at its first answer
};

// The system setting that makes a connection over a long path slow, by the kernel's counters of what it waited for.
// Any thread.
struct TcpLimits {                  // of TCP_INFO, tcp(7), since the connection was made
  int64_t busy_us = 0;              // with bytes to carry
  int64_t send_buffer_full_us = 0;  // of that: waiting for room in the send buffer
  int64_t window_full_us = 0;       // of that: waiting for the peer's window
  int64_t round_trip_us = 0;
  uint64_t sent = 0;  // packets with data
  uint64_t sent_again = 0;
  std::size_t window_bytes = 0;  // the peer's, now
  std::string congestion = {};   // the congestion control

  static TcpLimits of(int fd);

  // Empty if no setting limits it; else the setting, and a better value.
  std::string text() const;
};

// Advice to a user if packets of the size that the hosts send do not arrive (NetworkPath::HeldUp).
inline constexpr const char* kLargePacketsAdvice =
    "give the interfaces of these hosts and everything between them the same MTU (ip link set dev NAME mtu BYTES, as "
    "small as the smallest of them), or let Linux find the size: sysctl -w net.ipv4.tcp_mtu_probing=1 on every host";

// TcpWatch: watches a connected socket that another object owns: whether the host at its other end answers, and
// whether sent bytes arrive. Probes that host with another connection if the socket alone does not show it. Used by
// one thread at a time.
class TcpWatch {
 public:
  explicit TcpWatch(int fd);  // which outlives this

  int64_t host_silence_ms();
  NetworkPath::HeldUp held_up();
  const SocketAddress& peer() const { return peer_; }

 private:
  bool look();
  void ask_elsewhere(Clock::time_point now);

  int fd_;
  SocketAddress peer_;
  TcpHealth health_{Clock::now()};
  Fd probe_;
  Clock::time_point asked_at_{};
};

}  // namespace ringdp
