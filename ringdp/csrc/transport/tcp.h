// TCP: addresses, a listener, a non-blocking connection attempt, and the Channel over a connected socket.
// Used by the thread that builds the mesh, then by the one that drives the engine.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/fd.h"
#include "transport/channel.h"

namespace ringdp {

// An IPv4 or IPv6 address with its port.
class SocketAddress {
 public:
  SocketAddress() = default;
  // "10.0.0.1:29500", "[fe80::1%eth0]:29500"; throws Error(kValue).
  static SocketAddress parse(const std::string& text);
  static SocketAddress from_ip(const std::string& ip, uint16_t port);
  static SocketAddress from_raw(const sockaddr* raw, socklen_t length);

  std::string text() const;
  std::string ip() const;
  uint16_t port() const;
  void set_port(uint16_t port);
  int family() const { return storage_.ss_family; }
  bool is_loopback() const;
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

class TcpListener {
 public:
  // Binds `ip` on a free port of [low, high], or any port when both are 0. Throws Error(kSystem) naming them.
  TcpListener(const std::string& ip, uint16_t port_low, uint16_t port_high, int backlog);

  std::optional<std::pair<Fd, SocketAddress>> accept();  // nullopt: nobody there now
  SocketAddress address() const { return address_; }
  int poll_fd() const { return fd_.get(); }

 private:
  Fd fd_;
  SocketAddress address_;
};

// Starts connecting; the descriptor turns writable when it is decided, `connect_error` then says how (0: connected).
Fd start_connect(const SocketAddress& to);
int connect_error(int fd);

// The address this host would use to reach `to` (a UDP connect sends nothing); throws Error(kSystem) without a route.
std::string local_ip_towards(const SocketAddress& to);

// Takes a connected non-blocking socket.
std::unique_ptr<Channel> make_tcp_channel(Fd socket);

}  // namespace ringdp
