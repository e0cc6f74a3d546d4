// TcpWatch: watches a connected socket that another object owns: whether the host at its other end answers, and
// whether sent bytes arrive. Probes that host with another connection if the socket alone does not show it. Used by
// one thread at a time.
#pragma once

#include "base/fd.h"
#include "transport/tcp.h"
#include "transport/tcp_health.h"

namespace ringdp {

// Advice to a user if packets of the size that the hosts send do not arrive (NetworkPath::HeldUp).
inline constexpr const char* kLargePacketsAdvice =
    "give the interfaces of these hosts and everything between them the same MTU (ip link set dev NAME mtu BYTES, as "
    "small as the smallest of them), or let Linux find the size: sysctl -w net.ipv4.tcp_mtu_probing=1 on every host";

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
