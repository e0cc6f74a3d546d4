// What is said of a connection that a setting makes slow (TcpLimits).
#include "testing.h"
#include "transport/tcp_health.h"

namespace ringdp::testing {
namespace {

TcpLimits far_and_busy() {
  TcpLimits out;
  out.busy_us = 10'000'000;
  out.round_trip_us = 100'000;
  out.sent = 100'000;
  out.window_bytes = 1 << 20;
  out.congestion = "cubic";
  return out;
}

bool says(const TcpLimits& limits, const char* word) { return limits.text().find(word) != std::string::npos; }

}  // namespace

CASE("what limits is named, with the value that helps, and on which host") {
  TcpLimits buffer = far_and_busy(), window = far_and_busy(), losses = far_and_busy();
  buffer.send_buffer_full_us = 6'000'000;
  CHECK(says(buffer, "net.ipv4.tcp_wmem='4096 16384 67108864' here"));
  window.window_full_us = 6'000'000;
  CHECK(says(window, "net.ipv4.tcp_rmem='4096 131072 67108864' there"));
  losses.sent_again = 200;
  CHECK(says(losses, "200 of 100000 packets were lost") && says(losses, "tcp_congestion_control=bbr"));
}

CASE("nothing is said where nothing limits, of near hosts, of short work, of a peer that does not read, of bbr") {
  CHECK(far_and_busy().text().empty());
  TcpLimits near = far_and_busy(), brief = near, unread = near, bbr = near;
  near.send_buffer_full_us = brief.send_buffer_full_us = 6'000'000;
  near.round_trip_us = 200;
  CHECK(near.text().empty());
  brief.busy_us = 100'000;
  CHECK(brief.text().empty());
  unread.window_full_us = 9'000'000;
  unread.window_bytes = 0;
  CHECK(unread.text().empty());
  bbr.sent_again = 1000;
  bbr.congestion = "bbr";
  CHECK(bbr.text().empty());
  CHECK(TcpLimits::of(-1).text().empty());
}

}  // namespace ringdp::testing
