#include "transport/tcp_watch.h"

#include <poll.h>

#include <cerrno>

namespace ringdp {
namespace {

constexpr auto kAskEvery = std::chrono::seconds(1);

}  // namespace

TcpWatch::TcpWatch(int fd) : fd_(fd), peer_(SocketAddress::far_end_of(fd)) {}

int64_t TcpWatch::host_silence_ms() { return look() ? health_.silence_ms(Clock::now()) : 0; }

NetworkPath::HeldUp TcpWatch::held_up() {
  if (!look()) health_.note_reset();
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
