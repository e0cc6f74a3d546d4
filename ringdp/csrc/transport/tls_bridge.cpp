#include "transport/tls_bridge.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/thread.h"
#include "transport/tcp.h"

namespace ringdp {
namespace {

constexpr std::size_t kBufferBytes = 256 * 1024;
constexpr int kLookMs = 1000;
constexpr int kRoomMs = 20;

// False: the socket is broken. Sends what there is room for, and takes it out of `bytes`.
bool send_from(std::vector<std::byte>& bytes, int socket) {
  const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0) return errno == EAGAIN || errno == EINTR;
  bytes.erase(bytes.begin(), bytes.begin() + sent);
  return true;
}

}  // namespace

TlsBridge::TlsBridge(const TlsSettings& settings) : context_(make_tls_context(settings)) {
  thread_ = start_thread("tls-bridge", [this] { run(); });
}

TlsBridge::~TlsBridge() {
  coming_.stop();
  end_thread(thread_);
}

void TlsBridge::join(Fd plain, Fd connection, const Digest& key, bool dialled) {
  for (const Fd* socket : {&plain, &connection})
    fcntl(socket->get(), F_SETFL, fcntl(socket->get(), F_GETFL) | O_NONBLOCK);
  auto channel = make_tls_channel(make_tcp_channel(std::move(connection)),
                                  Protection{.tls = context_, .key = key, .dialled = dialled});
  channel->path()->watch_host(kSilenceMs);
  coming_.add({.plain = std::move(plain), .channel = std::move(channel)});
}

bool TlsBridge::pump(Pair& pair) {
  std::array<std::byte, 64 * 1024> buffer;
  if (!pair.plain_ended && pair.out.size() < kBufferBytes) {
    const ssize_t got = recv(pair.plain.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got > 0) pair.out.insert(pair.out.end(), buffer.begin(), buffer.begin() + got);
    if (got == 0) pair.plain_ended = true;
    if (got < 0 && errno != EAGAIN && errno != EINTR) return false;
  }
  // Without bytes, too: the handshake and what waits inside go on by this.
  const iovec out{pair.out.data(), pair.out.size()};
  const IoResult sent = pair.channel->send({&out, pair.out.empty() ? std::size_t{0} : std::size_t{1}});
  if (sent.status == IoStatus::kOk)
    pair.out.erase(pair.out.begin(), pair.out.begin() + static_cast<std::ptrdiff_t>(sent.bytes));
  if (sent.status == IoStatus::kBroken || sent.status == IoStatus::kClosed) return false;
  if (pair.plain_ended && pair.out.empty() && !std::exchange(pair.told, true)) pair.channel->close_send();
  while (!pair.channel_ended && pair.in.size() < kBufferBytes) {
    const iovec in{buffer.data(), buffer.size()};
    const IoResult got = pair.channel->receive({&in, 1});
    if (got.status == IoStatus::kBroken) return false;
    if (got.status == IoStatus::kClosed) pair.channel_ended = true;
    if (got.status != IoStatus::kOk) break;
    pair.in.insert(pair.in.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(got.bytes));
  }
  if (!pair.in.empty() && !send_from(pair.in, pair.plain.get())) return false;
  if (pair.channel_ended && pair.in.empty()) {
    shutdown(pair.plain.get(), SHUT_WR);
    return !(pair.told && pair.channel->drained());
  }
  return pair.channel->path()->host_silence_ms() <= kSilenceMs;
}

void TlsBridge::run() {
  std::list<Pair> pairs;
  std::vector<pollfd> polled;
  while (coming_.take(pairs)) {
    pairs.remove_if([this](Pair& pair) { return !pump(pair); });
    polled.assign(1, {coming_.fd(), POLLIN, 0});
    int wait_ms = kLookMs;
    for (const Pair& pair : pairs) {
      const bool reads = !pair.plain_ended && pair.out.size() < kBufferBytes;
      const int events = (reads ? POLLIN : 0) | (pair.in.empty() ? 0 : POLLOUT);
      // Without events poll(2) would still report an end, again and again.
      if (events != 0) polled.push_back({pair.plain.get(), static_cast<short>(events), 0});
      const bool takes = !pair.channel_ended && pair.in.size() < kBufferBytes;
      if (takes) polled.push_back({pair.channel->poll_fd(), POLLIN, 0});
      if (!takes && (!pair.out.empty() || pair.plain_ended)) wait_ms = kRoomMs;  // its descriptor stays readable
    }
    poll(polled.data(), polled.size(), wait_ms);
  }
}

}  // namespace ringdp
