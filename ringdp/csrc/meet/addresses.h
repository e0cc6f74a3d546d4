// The addresses of ranks: those of this host that a rank may publish (RINGDP_IFACE chooses among them), and the order
// in which those of a peer are tried. Reads the interfaces at each call; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "transport/tcp.h"

namespace ringdp {

struct Interface {
  std::string name;
  std::string ip;
  int prefix_bits = 0;  // of its network
  bool is_loopback = false;
  bool running = true;  // has a carrier
};

// All that are up, those with a carrier first, IPv4 before IPv6; without IPv6 link-local addresses.
std::vector<Interface> interfaces();

// Those that `spec` names: a list of interface names (or beginnings of names: eth; =eth stands for the whole name),
// addresses and networks (10.0.0.0/8), in its order; with ^ in front, all but those. An empty one takes all but
// loopback. Throws Error(kSystem) with the interfaces of this host if none matches.
std::vector<Interface> select_interfaces(const std::vector<Interface>& all, const std::string& spec);

// Whether `ip` and `network` have the same `bits` leading bits; false for different families.
bool in_network(const std::string& ip, const std::string& network, int bits);

// One listener per address, if possible all on one port, as firewalls and advertised addresses need. Throws
// Error(kSystem) if none could be bound.
std::vector<TcpListener> open_listeners(const std::vector<std::string>& ips, uint16_t port_low, uint16_t port_high,
                                        int backlog);

// The addresses to publish: `advertise` first, if given (RINGDP_ADVERTISE), with the listeners' port unless it has one
// of its own: "node7", "node7:30000", "fd00::7".
std::vector<std::string> addresses_to_publish(const std::vector<TcpListener>& listeners, const std::string& advertise);

// A door of the job (ringdp/launcher/door), through which ranks reach others that they cannot connect with.
struct DoorWay {
  std::string folder;  // empty: there is none. A file named by its port stands for each port where a rank listens
  uint16_t port = 0;   // of this host's launcher, on loopback
  uint32_t node = 0;   // the number of this host
  int64_t round_trip_us = 0;  // from this host to the door

  // As an address to publish, of a rank that listens at that port of loopback: "relay/3:41000".
  std::string published(uint16_t listens_at) const;
  // The address of the rank that has published this; nullopt: it is no such address.
  std::optional<SocketAddress> address_of(const std::string& published, std::span<const std::byte> secret) const;
};

// A port of loopback at which a rank listens, in the folder of its host's door as long as this lives.
class ListedPort {
 public:
  ListedPort(const DoorWay& door, uint16_t port);  // throws Error(kSystem)
  ~ListedPort();
  ListedPort(ListedPort&& other) noexcept : path_(std::exchange(other.path_, {})), generation_(other.generation_) {}
  ListedPort& operator=(ListedPort&&) = delete;

 private:
  std::string path_;  // empty: moved away
  unsigned generation_ = fork_generation();
};

// The addresses of a peer in the order to try them, and descriptions of those that cannot be reached from here.
struct Candidates {
  std::vector<SocketAddress> addresses;
  std::vector<std::string> left_out;  // "172.17.0.1:29600 (an address of this host, too)"
};

// `published`: "address:port" or "name:port" (looked up here, within `lookup_ms`). `same_network`: the peer shares this
// host's interfaces.
Candidates candidates_of_peer(const std::vector<std::string>& published, bool same_network,
                              const std::vector<Interface>& mine, int lookup_ms);

}  // namespace ringdp
