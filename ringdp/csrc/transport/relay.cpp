#include "transport/relay.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/thread.h"
#include "transport/congestion.h"
#include "transport/tcp.h"

namespace ringdp {
namespace {

constexpr int kPipeBytes = 256 << 10;
constexpr std::size_t kTurnBytes = std::size_t{4} << 20;  // of one pair before the next one's turn
constexpr int kLookMs = 1000;

// A pipe holds pages, and a packet may fill a small part of one: so the kernel decides when it is full.
bool would_wait(int error_number) { return error_number == EAGAIN || error_number == EWOULDBLOCK; }

void prepare(int socket) {
  const int flags = fcntl(socket, F_GETFL);
  fcntl(socket, F_SETFL, flags | O_NONBLOCK);
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

Relay::Relay() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw_system("make the descriptor of a relay", errno);
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, coming_.fd(), &event) != 0) throw_system("watch a descriptor", errno);
  thread_ = start_thread("relay", [this] { run(); });
}

Relay::~Relay() {
  coming_.stop();
  end_thread(thread_);
}

void Relay::join(Fd one, Fd other) {
  Pair pair{.one = std::move(one), .other = std::move(other), .there = {}, .back = {}};
  auto open = [](Way& way, int from, int to) {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_NONBLOCK | O_CLOEXEC) != 0) throw_system("make a pipe for a relayed connection", errno);
    way.out = Fd(ends[0]);
    way.in = Fd(ends[1]);
    way.from = from;
    way.to = to;
    fcntl(ends[1], F_SETPIPE_SZ, kPipeBytes);  // a smaller one will do
  };
  open(pair.there, pair.one.get(), pair.other.get());
  open(pair.back, pair.other.get(), pair.one.get());
  for (const int socket : {pair.one.get(), pair.other.get()}) {
    prepare(socket);
    const SocketAddress other_end = SocketAddress::far_end_of(socket);
    if (other_end.family() == AF_UNIX || other_end.is_loopback()) continue;
    ask_for_congestion(socket, kAutomaticCongestion);
    const int on = 1, period_s = 2, count = 3;  // an idle connection shows no silence by itself
    setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &period_s, sizeof period_s);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &period_s, sizeof period_s);
    setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    pair.hosts.emplace_back(socket);
  }
  coming_.add(std::move(pair));
}

Relay::Counts Relay::counts() const { return {.pairs = count_, .bytes = bytes_}; }

void Relay::Way::move(uint64_t& bytes, std::size_t& budget) {
  constexpr unsigned kFlags = SPLICE_F_MOVE | SPLICE_F_NONBLOCK;
  for (bool moved = true; moved && budget > 0;) {
    moved = false;
    if (!ended) {
      const ssize_t count = deaf ? recv(from, nullptr, kPipeBytes, MSG_TRUNC | MSG_DONTWAIT)
                                 : splice(from, nullptr, in.get(), nullptr, kPipeBytes, kFlags);
      moved = count > 0 || (count < 0 && errno == EINTR);
      if (count > 0 && !deaf) held += static_cast<std::size_t>(count);
      const bool failed = count < 0 && errno != EINTR && !would_wait(errno);
      ended = count == 0 || failed;
      broken = broken || failed;
    }
    if (held > 0) {
      const ssize_t count = splice(out.get(), nullptr, to, nullptr, held, kFlags);
      if (count > 0) {
        held -= static_cast<std::size_t>(count);
        bytes += static_cast<uint64_t>(count);
        budget -= std::min(budget, static_cast<std::size_t>(count));
        moved = true;
      } else if (count < 0 && errno == EINTR) {
        moved = true;
      } else if (count < 0 && !would_wait(errno)) {
        deaf = moved = true;
        held = 0;
      }
    }
  }
  if (ended && held == 0 && !passed_on) {
    shutdown(to, SHUT_WR);
    passed_on = true;
  }
}

bool Relay::pump(Pair& pair) {
  uint64_t bytes = 0;
  std::size_t there = kTurnBytes, back = kTurnBytes;
  pair.there.move(bytes, there);
  pair.back.move(bytes, back);
  pair.waits = there == 0 || back == 0;
  bytes_ += bytes;
  pair.there.deaf = pair.there.deaf || pair.back.broken;  // a socket that breaks does so both ways
  pair.back.deaf = pair.back.deaf || pair.there.broken;
  if ((pair.there.deaf || pair.back.deaf) && !pair.ends_at)
    pair.ends_at = Clock::now() + std::chrono::milliseconds(kLastMs);
  return !(pair.there.over() && pair.back.over());
}

void Relay::drop(std::list<Pair>::iterator pair) {
  // A forked child may hold copies until it calls exec: closing alone would leave them registered.
  for (const int socket : {pair->one.get(), pair->other.get()}) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr);
  pairs_.erase(pair);
  count_ = pairs_.size();
}

void Relay::look_at_hosts() {
  if (Clock::now() - looked_at_ < std::chrono::milliseconds(kLookMs)) return;
  looked_at_ = Clock::now();
  for (auto it = pairs_.begin(); it != pairs_.end();) {
    auto pair = it++;
    const bool silent = std::any_of(pair->hosts.begin(), pair->hosts.end(),
                                    [](TcpWatch& host) { return host.host_silence_ms() > kSilenceMs; });
    if (silent || (pair->ends_at && looked_at_ > *pair->ends_at)) drop(pair);
  }
}

void Relay::run() {
  std::array<epoll_event, 64> events{};
  bool waits = false;
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(), waits ? 0 : kLookMs);
    for (int i = 0; i < count; ++i)
      if (events[i].data.ptr != nullptr) static_cast<Pair*>(events[i].data.ptr)->waits = true;
    std::list<Pair> coming;
    if (!coming_.take(coming)) break;
    for (Pair& pair : coming) {
      pair.waits = true;
      for (const int socket : {pair.one.get(), pair.other.get()}) {
        epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data = {.ptr = &pair}};
        epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event);
      }
    }
    pairs_.splice(pairs_.end(), coming);
    count_ = pairs_.size();
    waits = false;
    for (auto it = pairs_.begin(); it != pairs_.end();) {
      auto pair = it++;
      if (!pair->waits) continue;
      if (!pump(*pair)) {
        drop(pair);
      } else {
        waits = waits || pair->waits;
      }
    }
    look_at_hosts();
  }
  pairs_.clear();
}

}  // namespace ringdp
