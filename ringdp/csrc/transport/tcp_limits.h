// The system setting that makes a connection over a long path slow, by the kernel's counters of what it waited for.
// Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ringdp {

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

}  // namespace ringdp
