// TCP: addresses, a listener, a non-blocking connection attempt, and the Channel over a connected socket.
// Used by the thread that builds the mesh, then by the one that drives the engine.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

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
  static SocketAddress far_end_of(int fd);  // family AF_UNSPEC if it is not a connected socket
  static SocketAddress from_raw(const sockaddr* raw, socklen_t length);
  // Of a process that is reached through another one, at a port of loopback, which has to read `greeting` first.
  static SocketAddress relayed(uint16_t port, std::vector<std::byte> greeting, std::string text);

  bool is_relayed() const { return relayed_ != nullptr; }
  std::span<const std::byte> greeting() const;  // the first bytes on a connection; usually none
  std::string text() const;
  std::string ip() const;
  uint16_t port() const;
  void set_port(uint16_t port);
  int family() const { return storage_.ss_family; }
  bool is_loopback() const;
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }

 private:
  struct Relayed {
    std::vector<std::byte> greeting;
    std::string text;
  };

  sockaddr_storage storage_{};
  socklen_t length_ = 0;
  std::shared_ptr<const Relayed> relayed_;  // shared by copies
};

// Listens at `address` as long as it lives.
class TcpListener {
 public:
  // Port 0 takes any. nullopt, with errno's value, if the address or port is not available.
  static std::optional<TcpListener> try_bind(const std::string& ip, uint16_t port, int backlog, int& error_number);

  // nullopt: no connection waits; with `error_number` not 0, none can be accepted, for lack of descriptors or memory.
  std::optional<std::pair<Fd, SocketAddress>> accept(int& error_number);
  SocketAddress address() const { return address_; }
  int poll_fd() const { return fd_.get(); }
  TcpListener share() const;  // the same socket with another descriptor; throws Error(kSystem)

 private:
  TcpListener() = default;

  Fd fd_;
  SocketAddress address_;
};

// Starts connecting; the descriptor turns writable at the end, and `connect_error` then gives the result (0:
// connected). An empty Fd and errno's value if that fails at once (no route, no descriptor).
Fd start_connect(const SocketAddress& to, int& error_number);
int connect_error(int fd);
std::size_t largest_payload(
    int fd);  // bytes that one packet of a connected socket carries; 0: inside this host, or unknown
std::string connection_text(int fd);  // "10.0.0.1:41000 -> 10.0.0.2:29500"

// Takes a connected non-blocking socket.
std::unique_ptr<Channel> make_tcp_channel(Fd socket);

struct Transport;
const Transport& tcp_transport();

}  // namespace ringdp
