#include "transport/tcp.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/deadline.h"
#include "base/error.h"
#include "transport/striped.h"
#include "transport/tcp_health.h"
#include "transport/transport.h"

namespace ringdp {
namespace {

// One small number at the end of an address, 0..65535.
uint16_t parse_port(const std::string& text, const std::string& whole) {
  std::size_t used = 0;
  unsigned long value = 70000;
  try {
    value = std::stoul(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size() || value > 65535)
    throw Error(ErrorKind::kValue, "not a port number: '" + text + "' in address '" + whole + "'");
  return static_cast<uint16_t>(value);
}

// Without Nagle's algorithm: messages of the rendezvous are small, too.
void send_at_once(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

template <class GetName>
SocketAddress end_of(int fd, GetName get_name) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  if (get_name(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return {};
  return SocketAddress::from_raw(reinterpret_cast<sockaddr*>(&storage), length);
}

class TcpChannel final : public Channel, private NetworkPath {
 public:
  explicit TcpChannel(Fd socket) : fd_(std::move(socket)) {
    send_at_once(fd_.get());
    description_ = "tcp " + connection_text(fd_.get());
  }

  IoResult send(std::span<const iovec> pieces) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces.data());
    message.msg_iovlen = pieces.size();
    for (;;) {
      ssize_t moved = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (moved >= 0) return {IoStatus::kOk, static_cast<std::size_t>(moved), 0};
      if (errno == EINTR) continue;
      return failure(errno);
    }
  }

  void limit_unsent(std::size_t bytes) override {  // tcp(7): without it, the queue is as long as the send buffer
    const int most = static_cast<int>(bytes);
    setsockopt(fd_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &most, sizeof(most));
  }

  IoResult receive(std::span<const iovec> pieces) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces.data());
    message.msg_iovlen = pieces.size();
    for (;;) {
      ssize_t moved = recvmsg(fd_.get(), &message, MSG_DONTWAIT);
      if (moved > 0) return {IoStatus::kOk, static_cast<std::size_t>(moved), 0};
      if (moved == 0 && !std::exchange(ended_, true)) {
        if (!ended_by_peer()) shutdown(fd_.get(), SHUT_RDWR);
        continue;  // reads what came until now
      }
      if (moved == 0) return {IoStatus::kClosed, 0, 0};
      if (errno == EINTR) continue;
      return failure(errno);
    }
  }

  // A process can read the bytes that its host has acknowledged, even if the connection has broken since.
  std::size_t undelivered() override {
    int bytes = 0;
    return ioctl(fd_.get(), SIOCOUTQ, &bytes) != 0 ? SIZE_MAX : static_cast<std::size_t>(bytes);
  }
  // tcp(7): SIOCOUTQ counts unacknowledged bytes. A close with unread input resets the connection and drops them.
  bool drained() override {
    int unacknowledged = 0;
    return ioctl(fd_.get(), SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0;
  }
  void close_send() override { shutdown(fd_.get(), SHUT_WR); }

  // tcp(7): the kernel answers even if the process is stopped or busy. Not TCP_USER_TIMEOUT, which would end the
  // connection to a peer that lives and does not read.
  void watch_host(int64_t silence_ms) override {
    int on = 1, count = 3, period_s = static_cast<int>(std::max<int64_t>(1, silence_ms / 1000 / (count + 1)));
    setsockopt(fd_.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    setsockopt(fd_.get(), IPPROTO_TCP, TCP_KEEPIDLE, &period_s, sizeof(period_s));
    setsockopt(fd_.get(), IPPROTO_TCP, TCP_KEEPINTVL, &period_s, sizeof(period_s));
    setsockopt(fd_.get(), IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
  }

  // Keepalive rests while bytes are under way, and retransmission gives up after a quarter of an hour only. A closed
  // window of the peer is not silence: its host answers the probes.
  int64_t host_silence_ms() override { return watch_.host_silence_ms(); }
  HeldUp held_up() override { return watch_.held_up(); }
  std::optional<Carried> carried() const override { return TcpHealth::carried(fd_.get()); }
  std::string slowed_by() const override { return TcpLimits::of(fd_.get()).text(); }
  NetworkPath* path() override { return this; }
  int poll_fd() const override { return fd_.get(); }
  std::string describe() const override { return description_; }

 private:
  // False: only this side's reading was shut down. The peer could still send, and its host would count those bytes as
  // delivered.
  bool ended_by_peer() const {
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (getsockopt(fd_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
    return info.tcpi_state != TCP_ESTABLISHED && info.tcpi_state != TCP_FIN_WAIT1 && info.tcpi_state != TCP_FIN_WAIT2;
  }

  static IoResult failure(int error_number) {
    if (error_number == EAGAIN || error_number == EWOULDBLOCK) return {IoStatus::kWouldBlock, 0, 0};
    return {IoStatus::kBroken, 0, error_number};
  }

  Fd fd_;
  TcpWatch watch_{fd_.get()};
  std::string description_;
  bool ended_ = false;  // no more bytes will be received
};

}  // namespace

SocketAddress SocketAddress::from_raw(const sockaddr* raw, socklen_t length) {
  SocketAddress address;
  address.length_ = std::min<socklen_t>(length, sizeof(address.storage_));
  std::memcpy(&address.storage_, raw, address.length_);
  return address;
}

SocketAddress SocketAddress::relayed(uint16_t port, std::vector<std::byte> greeting, std::string text) {
  SocketAddress out = from_ip("127.0.0.1", port);
  out.relayed_ = std::make_shared<const Relayed>(Relayed{std::move(greeting), std::move(text)});
  return out;
}

std::span<const std::byte> SocketAddress::greeting() const {
  return relayed_ ? std::span<const std::byte>(relayed_->greeting) : std::span<const std::byte>();
}

SocketAddress SocketAddress::far_end_of(int fd) { return end_of(fd, getpeername); }

SocketAddress SocketAddress::from_ip(const std::string& ip, uint16_t port) {
  SocketAddress address;
  std::string bare = ip, zone;
  if (auto percent = ip.find('%'); percent != std::string::npos) {
    bare = ip.substr(0, percent);
    zone = ip.substr(percent + 1);
  }
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage_);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage_);
  if (inet_pton(AF_INET, bare.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    address.length_ = sizeof(sockaddr_in);
  } else if (inet_pton(AF_INET6, bare.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_scope_id = zone.empty() ? 0 : if_nametoindex(zone.c_str());
    address.length_ = sizeof(sockaddr_in6);
  } else {
    throw Error(ErrorKind::kValue, "not an IPv4 or IPv6 address: '" + ip + "'");
  }
  address.set_port(port);
  return address;
}

SocketAddress SocketAddress::parse(const std::string& text) {
  auto colon = text.rfind(':');
  if (colon == std::string::npos) throw Error(ErrorKind::kValue, "an address needs a port: '" + text + "'");
  std::string ip = text.substr(0, colon);
  if (ip.size() >= 2 && ip.front() == '[' && ip.back() == ']') ip = ip.substr(1, ip.size() - 2);
  return from_ip(ip, parse_port(text.substr(colon + 1), text));
}

std::string SocketAddress::ip() const {
  char buffer[INET6_ADDRSTRLEN] = "";
  if (family() == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(&storage_)->sin_addr, buffer, sizeof(buffer));
  } else if (family() == AF_INET6) {
    auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage_);
    inet_ntop(AF_INET6, &v6->sin6_addr, buffer, sizeof(buffer));
    char zone[IF_NAMESIZE];
    if (v6->sin6_scope_id != 0 && if_indextoname(v6->sin6_scope_id, zone) != nullptr)
      return std::string(buffer) + "%" + zone;
  }
  return buffer;
}

std::string SocketAddress::text() const {
  if (relayed_) return relayed_->text;
  return (family() == AF_INET6 ? "[" + ip() + "]" : ip()) + ":" + std::to_string(port());
}

uint16_t SocketAddress::port() const {
  if (family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage_)->sin_port);
}

void SocketAddress::set_port(uint16_t port) {
  if (family() == AF_INET6)
    reinterpret_cast<sockaddr_in6*>(&storage_)->sin6_port = htons(port);
  else
    reinterpret_cast<sockaddr_in*>(&storage_)->sin_port = htons(port);
}

bool SocketAddress::is_loopback() const {
  if (family() == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in*>(&storage_)->sin_addr.s_addr) >> 24) == 127;
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_addr);
}

std::optional<TcpListener> TcpListener::try_bind(const std::string& ip, uint16_t port, int backlog, int& error_number) {
  SocketAddress wanted = SocketAddress::from_ip(ip, port);
  Fd fd(socket(wanted.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int one = 1;
  // SO_REUSEADDR: a port with a listener stays refused; old connections of an ended job do not block its port.
  if (!fd || (port != 0 && setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) != 0) ||
      bind(fd.get(), wanted.raw(), wanted.length()) != 0 || listen(fd.get(), backlog) != 0) {
    error_number = errno;
    return std::nullopt;
  }
  sockaddr_storage storage;
  socklen_t length = sizeof(storage);
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&storage), &length);
  TcpListener listener;
  listener.address_ = SocketAddress::from_raw(reinterpret_cast<sockaddr*>(&storage), length);
  listener.fd_ = std::move(fd);
  return listener;
}

TcpListener TcpListener::share() const {
  TcpListener copy;
  copy.fd_ = Fd(fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy.fd_) throw_system("copy the descriptor of a listening socket", errno);
  copy.address_ = address_;
  return copy;
}

std::optional<std::pair<Fd, SocketAddress>> TcpListener::accept(int& error_number) {
  sockaddr_storage storage;
  socklen_t length = sizeof(storage);
  int fd = accept4(fd_.get(), reinterpret_cast<sockaddr*>(&storage), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    // Otherwise no connection waits, or one has died in the backlog.
    bool short_of = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    error_number = short_of ? errno : 0;
    return std::nullopt;
  }
  send_at_once(fd);
  return std::pair(Fd(fd), SocketAddress::from_raw(reinterpret_cast<sockaddr*>(&storage), length));
}

Fd start_connect(const SocketAddress& to, int& error_number) {
  Fd fd(socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  error_number = fd ? 0 : errno;
  if (fd) send_at_once(fd.get());
  while (fd && connect(fd.get(), to.raw(), to.length()) != 0) {
    if (errno == EINPROGRESS) break;
    if (errno == EINTR) continue;
    error_number = errno;
    return Fd();
  }
  return fd;
}

int connect_error(int fd) {
  int error_number = 0;
  socklen_t length = sizeof(error_number);
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error_number, &length) != 0) return errno;
  return error_number;
}

std::size_t largest_payload(int fd) {
  if (end_of(fd, getsockname).ip() == SocketAddress::far_end_of(fd).ip()) return 0;
  tcp_info info{};
  socklen_t length = sizeof(info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 ? info.tcpi_snd_mss : 0;
}

std::string connection_text(int fd) {
  return end_of(fd, getsockname).text() + " -> " + SocketAddress::far_end_of(fd).text();
}

std::unique_ptr<Channel> make_tcp_channel(Fd socket) { return std::make_unique<TcpChannel>(std::move(socket)); }

namespace {

std::unique_ptr<Channel> open_tcp(std::vector<Fd> sockets) {
  const bool one = sockets.size() == 1;
  std::vector<std::unique_ptr<Channel>> channels;
  for (Fd& it : sockets)
    if (it) channels.push_back(make_tcp_channel(std::move(it)));
  return one ? std::move(channels.front()) : make_striped_channel(std::move(channels));
}

}  // namespace

const Transport& tcp_transport() {
  static constexpr Transport kTcp{.name = "tcp", .title = "TCP", .checksums = true, .open = open_tcp};
  return kTcp;
}

}  // namespace ringdp
