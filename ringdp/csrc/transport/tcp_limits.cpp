#include "transport/tcp_limits.h"

#include <linux/tcp.h>  // has more of tcp_info than netinet/tcp.h
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>

namespace ringdp {
namespace {

constexpr int64_t kLongPathUs = 5000;          // over shorter ones any buffer is large enough
constexpr int64_t kEnoughSeenUs = 500'000;     // of work
constexpr uint64_t kLossy = 1000;              // one packet of so many
constexpr std::size_t kShutBytes = 16 * 1024;  // with a smaller window the peer does not read
constexpr const char* kEnough = "67108864";

}  // namespace

TcpLimits TcpLimits::of(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  TcpLimits out;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return out;
  out.busy_us = static_cast<int64_t>(info.tcpi_busy_time);
  out.send_buffer_full_us = static_cast<int64_t>(info.tcpi_sndbuf_limited);
  out.window_full_us = static_cast<int64_t>(info.tcpi_rwnd_limited);
  out.round_trip_us = info.tcpi_rtt;
  out.sent = info.tcpi_data_segs_out;
  out.sent_again = info.tcpi_total_retrans;
  out.window_bytes = info.tcpi_snd_wnd;
  std::array<char, 17> name{};  // TCP_CA_NAME_MAX
  length = name.size() - 1;
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &length) == 0) out.congestion = name.data();
  return out;
}

std::string TcpLimits::text() const {
  if (round_trip_us < kLongPathUs || busy_us < kEnoughSeenUs) return "";
  const std::string path = "over this path of " + std::to_string(round_trip_us / 1000) + " ms ";
  if (2 * send_buffer_full_us > busy_us)
    return path + "the send buffer limits: sysctl -w net.ipv4.tcp_wmem='4096 16384 " + kEnough + "' here";
  if (2 * window_full_us > busy_us && window_bytes >= kShutBytes)
    return path + "the receive buffer of that host limits: sysctl -w net.ipv4.tcp_rmem='4096 131072 " + kEnough +
           "' there";
  if (sent_again * kLossy > sent && !congestion.starts_with("bbr"))
    return path + std::to_string(sent_again) + " of " + std::to_string(sent) +
           " packets were lost, after each of which " + congestion +
           " is slow for a while: sysctl -w net.ipv4.tcp_congestion_control=bbr here, or, where programs are "
           "to choose it, net.ipv4.tcp_allowed_congestion_control='reno cubic bbr' (RINGDP_CONGESTION)";
  return "";
}

}  // namespace ringdp
