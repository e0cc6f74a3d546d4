// TcpWatch: looks at a connected socket that another object owns, and says whether the host at its other end is there
// and whether what is sent arrives. Asks that host elsewhere where the socket alone cannot tell. Used by one thread at
// a time.
#pragma once

#include "base/fd.h"
#include "transport/tcp.h"
#include "transport/tcp_health.h"

namespace ringdp {

class TcpWatch {
 public:
  explicit TcpWatch(int fd);  // which outlives this

  int64_t host_silence_ms();
  Channel::HeldUp held_up();
  const SocketAddress& peer() const { return peer_; }

 private:
  bool look();
  void ask_elsewhere(Clock::time_point now);

  int fd_;
  SocketAddress peer_;
  TcpHealth health_{Clock::now()};
  Fd question_;
  Clock::time_point asked_at_{};
};

}  // namespace ringdp
