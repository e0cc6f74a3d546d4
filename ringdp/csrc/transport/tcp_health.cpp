#include "transport/tcp_health.h"

#include <linux/sockios.h>
#include <linux/tcp.h>  // has more of tcp_info than netinet/tcp.h
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace ringdp {
namespace {

using std::chrono::milliseconds;

constexpr uint32_t kUnansweredProbes = 2;  // one unanswered probe is normal
constexpr milliseconds kAbsence{2000};     // between two calls: this process itself was stopped
constexpr milliseconds kDoubt{1000};       // without an answer, or an advance
constexpr milliseconds kAnswersNow{2000};  // what counts as answering
constexpr uint32_t kSentAgain = 2;  // retransmissions while the host answers: with the pauses between them not chance

constexpr uint8_t kClosed = 7;  // TCP_CLOSE of netinet/tcp.h

int64_t ms_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration_cast<milliseconds>(to - from).count();
}

int64_t known(uint32_t round_trip_us) { return round_trip_us == ~uint32_t{0} ? 0 : round_trip_us; }

}  // namespace

int64_t tcp_round_trip_us(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return 0;
  return known(info.tcpi_min_rtt);
}

std::optional<TcpHealth::Counters> TcpHealth::Counters::of(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  int queued = 0;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_state == kClosed ||
      ioctl(fd, SIOCOUTQ, &queued) != 0)
    return std::nullopt;
  return Counters{
      .unacknowledged = info.tcpi_unacked,
      .probes = info.tcpi_probes,
      .retransmitted = info.tcpi_total_retrans,
      .sent = info.tcpi_data_segs_out,
      .received = info.tcpi_segs_in,
      .packet_bytes = info.tcpi_snd_mss,
      .acknowledged = info.tcpi_bytes_acked,
      .since_ack_ms = info.tcpi_last_ack_recv,
      .under_way_bytes = static_cast<std::size_t>(std::max<int64_t>(0, int64_t{queued} - info.tcpi_notsent_bytes)),
      .waiting_bytes = info.tcpi_notsent_bytes,
      .window_bytes = info.tcpi_snd_wnd};  // 0 where the kernel is too old to tell
}

std::optional<NetworkPath::Carried> TcpHealth::carried(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return std::nullopt;
  return NetworkPath::Carried{.bytes = info.tcpi_bytes_acked,
                              .busy_us = static_cast<int64_t>(info.tcpi_busy_time - info.tcpi_rwnd_limited),
                              .round_trip_us = info.tcpi_rtt,
                              .least_round_trip_us = known(info.tcpi_min_rtt),
                              .idle_ms = info.tcpi_last_data_sent,
                              .bytes_per_s = info.tcpi_delivery_rate};
}

void TcpHealth::look(const Counters& counters, Clock::time_point now) {
  const bool absent = now - looked_at_ > kAbsence;
  const bool advanced = counters.acknowledged != last_.acknowledged || counters.packet_bytes != last_.packet_bytes;
  const bool received = counters.received != last_.received;
  unacknowledged_ = counters.unacknowledged > 0 || counters.probes >= kUnansweredProbes;
  if (!unacknowledged_ || absent) silent_since_ = now;
  silent_since_ = std::max(silent_since_, now - milliseconds(counters.since_ack_ms));
  sent_again_ += counters.retransmitted - last_.retransmitted;
  if (counters.refused() && last_.refused() && counters.sent != last_.sent) ++sent_again_;
  if (!counters.pending() || advanced || absent) {  // a smaller packet_bytes: the kernel probes for a size that passes
    held_up_since_ = now;
    answers_ = false;
  }
  last_ = counters;
  // Packets without an acknowledgement count as answers too: the peer's keepalive.
  if (received && !absent && counters.since_ack_ms > ms_between(looked_at_, now)) silent_since_ = now;
  if (received && !advanced && !absent) note_answer(now);
  looked_at_ = now;
}

void TcpHealth::answered_elsewhere(Clock::time_point now) {
  silent_since_ = now;
  note_answer(now);
}

void TcpHealth::note_reset(Clock::time_point now) {
  if (!reset_ && now - looked_at_ > kAbsence) held_up_since_ = now;  // what was under way then may have arrived since
  reset_ = true;
}

void TcpHealth::note_answer(Clock::time_point now) {
  if (!answers_) sent_again_before_ = sent_again_;
  answers_ = true;
  answered_at_ = now;
}

int64_t TcpHealth::silence_ms(Clock::time_point now) const {
  return unacknowledged_ ? ms_between(silent_since_, now) : 0;
}

int64_t TcpHealth::held_up_ms(Clock::time_point now) const {
  if (reset_) return last_.pending() ? ms_between(held_up_since_, now) : 0;
  if (!answers_ || now - answered_at_ > kAnswersNow || sent_again_ - sent_again_before_ < kSentAgain) return 0;
  return ms_between(held_up_since_, now);
}

std::size_t TcpHealth::packet_bytes_under_way() const {
  return std::min<std::size_t>(last_.refused() ? last_.waiting_bytes : last_.under_way_bytes, last_.packet_bytes);
}

bool TcpHealth::doubtful(Clock::time_point now) const {
  return last_.pending() && now - held_up_since_ >= kDoubt && (!answers_ || now - answered_at_ >= kDoubt);
}

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

namespace {

constexpr auto kAskEvery = std::chrono::seconds(1);

}  // namespace

TcpWatch::TcpWatch(int fd) : fd_(fd), peer_(SocketAddress::far_end_of(fd)) {}

int64_t TcpWatch::host_silence_ms() { return look() ? health_.silence_ms(Clock::now()) : 0; }

NetworkPath::HeldUp TcpWatch::held_up() {
  if (!look()) health_.note_reset(Clock::now());
  return {health_.held_up_ms(Clock::now()), health_.packet_bytes_under_way()};
}

bool TcpWatch::look() {
  auto counters = TcpHealth::Counters::of(fd_);
  if (!counters) return false;
  auto now = Clock::now();
  health_.look(*counters, now);
  ask_elsewhere(now);
  return true;
}

// If both ends have only large packets in flight, a path that loses those is as silent as a dead host. A live host
// refuses or accepts a connection to this port, with small packets.
void TcpWatch::ask_elsewhere(Clock::time_point now) {
  int error_number = EAGAIN;  // no answer
  if (probe_) {
    pollfd polled{probe_.get(), POLLOUT, 0};
    if (poll(&polled, 1, 0) > 0) error_number = connect_error(probe_.get());
    if (error_number != EAGAIN || now - asked_at_ >= kAskEvery) probe_.reset();
  }
  if (error_number == EAGAIN && !probe_ && health_.doubtful(now) && now - asked_at_ >= kAskEvery) {
    asked_at_ = now;
    int failed = 0;
    probe_ = start_connect(peer_, failed);
    if (!probe_) error_number = failed;
  }
  if (error_number == 0 || error_number == ECONNREFUSED) health_.answered_elsewhere(now);
}

}  // namespace ringdp
