#include "meet/addresses.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <future>
#include <optional>
#include <span>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"
#include "base/sha256.h"
#include "meet/store.h"

namespace ringdp {
namespace {

std::optional<std::vector<uint8_t>> bytes_of(const std::string& ip) {
  std::vector<uint8_t> out(16);
  std::string bare = ip.substr(0, ip.find('%'));
  if (inet_pton(AF_INET6, bare.c_str(), out.data()) == 1) return out;
  out.resize(4);
  if (inet_pton(AF_INET, bare.c_str(), out.data()) == 1) return out;
  return std::nullopt;
}

int leading_ones(std::span<const uint8_t> mask) {
  int bits = 0;
  for (uint8_t byte : mask) {
    bits += std::countl_one(byte);
    if (byte != 0xff) break;
  }
  return bits;
}

int prefix_bits(const sockaddr* mask) {
  if (mask == nullptr) return 0;
  if (mask->sa_family == AF_INET6)
    return leading_ones({reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr.s6_addr, 16});
  auto* v4 = reinterpret_cast<const sockaddr_in*>(mask);
  return leading_ones({reinterpret_cast<const uint8_t*>(&v4->sin_addr.s_addr), 4});
}

bool is_link_local(const sockaddr* raw) {
  return raw->sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(raw)->sin6_addr);
}

enum class Match { kNone, kBeginning, kWhole };

// How an item of RINGDP_IFACE matches an interface.
Match match(const Interface& it, const std::string& item) {
  if (auto slash = item.find('/'); slash != std::string::npos) {
    auto bits = number(item.substr(slash + 1));
    bool inside = bits >= 0 && in_network(it.ip, item.substr(0, slash), static_cast<int>(std::min<int64_t>(bits, 128)));
    return inside ? Match::kWhole : Match::kNone;
  }
  if (auto wanted = bytes_of(item)) return wanted == bytes_of(it.ip) ? Match::kWhole : Match::kNone;
  if (item.front() == '=') return it.name == item.substr(1) ? Match::kWhole : Match::kNone;
  if (it.name == item) return Match::kWhole;
  return it.name.starts_with(item) ? Match::kBeginning : Match::kNone;
}

std::vector<Interface> all_but(const std::vector<Interface>& all, const std::vector<std::string>& items) {
  std::vector<Interface> out;
  for (const Interface& it : all) {
    bool excluded = it.is_loopback;
    for (const std::string& item : items) {
      std::string bare = item.front() == '^' ? item.substr(1) : item;
      excluded = excluded || (!bare.empty() && match(it, bare) != Match::kNone);
    }
    if (!excluded) out.push_back(it);
  }
  return out;
}

std::vector<Interface> only(const std::vector<Interface>& all, const std::vector<std::string>& items) {
  std::vector<Interface> out;
  auto taken = [&](const Interface& it) {
    return std::any_of(out.begin(), out.end(), [&](const Interface& o) { return o.ip == it.ip && o.name == it.name; });
  };
  for (const std::string& item : items) {
    // A whole name has precedence over a prefix: eth1 does not match eth10 too.
    for (Match wanted : {Match::kWhole, Match::kBeginning}) {
      std::size_t before = out.size();
      for (const Interface& it : all)
        if (match(it, item) == wanted && !taken(it)) out.push_back(it);
      if (out.size() > before) break;
    }
  }
  return out;
}

// getaddrinfo(3) may take long, so a thread runs it, which ends by itself if the caller gives up.
std::vector<SocketAddress> look_up(const std::string& name, const std::string& port, int limit_ms,
                                   std::string& problem) {
  struct Answer {
    int error = 0;
    std::vector<SocketAddress> addresses;
  };
  auto promise = std::make_shared<std::promise<Answer>>();  // owned by the thread and by the caller that waits
  std::future<Answer> future = promise->get_future();
  std::thread([promise, name, port] {
    Answer answer;
    addrinfo hints{}, *list = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    answer.error = getaddrinfo(name.c_str(), port.c_str(), &hints, &list);
    if (answer.error == 0) {
      for (addrinfo* it = list; it != nullptr; it = it->ai_next)
        answer.addresses.push_back(SocketAddress::from_raw(it->ai_addr, it->ai_addrlen));
      freeaddrinfo(list);
    }
    promise->set_value(std::move(answer));
  }).detach();
  if (future.wait_for(std::chrono::milliseconds(limit_ms)) != std::future_status::ready) {
    problem = "the name was not found in " + std::to_string(limit_ms) + " ms";
    return {};
  }
  Answer answer = future.get();
  if (answer.error != 0) problem = gai_strerror(answer.error);
  return answer.addresses;
}

}  // namespace

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw_system("list the network interfaces", errno);
  std::vector<Interface> out;
  for (ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    if (it->ifa_addr == nullptr || (it->ifa_flags & IFF_UP) == 0 || is_link_local(it->ifa_addr)) continue;
    int family = it->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    out.push_back({it->ifa_name, SocketAddress::from_raw(it->ifa_addr, length).ip(), prefix_bits(it->ifa_netmask),
                   (it->ifa_flags & IFF_LOOPBACK) != 0, (it->ifa_flags & IFF_RUNNING) != 0});
  }
  freeifaddrs(list);
  auto is_v6 = [](const Interface& it) { return it.ip.find(':') != std::string::npos; };
  std::stable_sort(out.begin(), out.end(), [&](const Interface& a, const Interface& b) {
    return std::pair(!a.running, is_v6(a)) < std::pair(!b.running, is_v6(b));
  });
  return out;
}

bool in_network(const std::string& ip, const std::string& network, int bits) {
  auto a = bytes_of(ip), b = bytes_of(network);
  if (!a || !b || a->size() != b->size() || bits > static_cast<int>(a->size()) * 8) return false;
  for (std::size_t i = 0; i < a->size() && bits > 0; ++i, bits -= 8) {
    auto mask = static_cast<uint8_t>(bits >= 8 ? 0xff : 0xff << (8 - bits));
    if (((*a)[i] & mask) != ((*b)[i] & mask)) return false;
  }
  return true;
}

std::vector<Interface> select_interfaces(const std::vector<Interface>& all, const std::string& spec) {
  std::vector<std::string> items = split(spec, ',');
  bool exclude = items.empty() || items.front().front() == '^';
  std::vector<Interface> out = exclude ? all_but(all, items) : only(all, items);
  if (!out.empty()) return out;
  std::vector<Interface> by_name = all;
  std::stable_sort(by_name.begin(), by_name.end(),
                   [](const Interface& a, const Interface& b) { return a.name < b.name; });
  std::string known;
  for (const Interface& it : by_name) known += (known.empty() ? "" : ", ") + it.name + " (" + it.ip + ")";
  if (known.empty()) known = "none";
  if (spec.empty())
    throw Error(ErrorKind::kSystem,
                "this host has no address that other hosts could reach; its interfaces that are up: " + known);
  throw Error(ErrorKind::kSystem, "RINGDP_IFACE names no interface that is up: '" + spec + "'; there are " + known);
}

std::vector<TcpListener> open_listeners(const std::vector<std::string>& ips, uint16_t port_low, uint16_t port_high,
                                        int backlog) {
  constexpr int kTries = 32;  // for one port that is free on every address
  bool any = port_low == 0;
  std::string problem;
  int low = any ? 0 : port_low, high = any ? kTries - 1 : port_high;
  for (int i = low; i <= high; ++i) {
    std::vector<TcpListener> listeners;
    uint16_t port = any ? 0 : static_cast<uint16_t>(i);
    bool taken = false;
    for (const std::string& ip : ips) {
      int error_number = 0;
      auto listener = TcpListener::try_bind(ip, listeners.empty() ? port : listeners.front().address().port(), backlog,
                                            error_number);
      if (listener) {
        listeners.push_back(std::move(*listener));
        continue;
      }
      problem = ip + ": " + errno_text(error_number);
      // An address may have been removed since it was listed, or be IPv6 and not usable yet: then only the others are
      // used.
      taken = taken || error_number == EADDRINUSE || error_number == EACCES;
    }
    if (!taken && !listeners.empty()) return listeners;
    if (!taken) break;
  }
  std::string ports = any ? "any port" : "ports " + std::to_string(low) + " to " + std::to_string(high);
  throw Error(ErrorKind::kSystem, "cannot listen on " + join(ips, ", ") + ", " + ports + " (" + problem + ")" +
                                      (any ? "" : ": set RINGDP_PORT_RANGE to ports that are free, one per rank"));
}

std::vector<std::string> addresses_to_publish(const std::vector<TcpListener>& listeners, const std::string& advertise) {
  std::vector<std::string> out;
  if (!advertise.empty()) {
    bool v6 = std::count(advertise.begin(), advertise.end(), ':') > 1;
    if (advertise.front() == '[') v6 = false;
    const std::string whole = v6 ? "[" + advertise + "]" : advertise;
    const bool has_port = whole.rfind(':') != std::string::npos && whole.back() != ']';
    out.push_back(has_port ? whole : whole + ":" + std::to_string(listeners.front().address().port()));
  }
  for (const TcpListener& it : listeners) out.push_back(it.address().text());
  return out;
}

namespace {

constexpr std::string_view kRelay = "relay/";
// Of the wish, by which a rank's launcher learns where to lead a connection (docs/reference/wire_format.md).
constexpr std::array<char, 8> kWishMagic{'R', 'I', 'N', 'G', 'D', 'P', 'V', 'I'};
constexpr std::size_t kWishBytes = 32;

}  // namespace

std::string DoorWay::published(uint16_t listens_at) const {
  return std::string(kRelay) + std::to_string(node) + ":" + std::to_string(listens_at);
}

std::optional<SocketAddress> DoorWay::address_of(const std::string& published,
                                                 std::span<const std::byte> secret) const {
  if (folder.empty() || !published.starts_with(kRelay)) return std::nullopt;
  const auto colon = published.find(':');
  if (colon == std::string::npos) return std::nullopt;
  const int64_t to = number(published.substr(kRelay.size(), colon - kRelay.size()));
  const int64_t at = number(published.substr(colon + 1));
  if (to < 0 || to > INT32_MAX || at <= 0 || at > UINT16_MAX) return std::nullopt;
  std::vector<std::byte> wish(kWishBytes);
  std::memcpy(wish.data(), kWishMagic.data(), kWishMagic.size());
  put(wish.data() + 8, static_cast<uint32_t>(to));
  put(wish.data() + 12, static_cast<uint32_t>(at));
  random_bytes(std::span(wish).subspan(16));
  const Digest proof = hmac_sha256(secret, wish);
  wish.insert(wish.end(), proof.begin(), proof.end());
  return SocketAddress::relayed(port, std::move(wish),
                                "the door, to port " + std::to_string(at) + " of node " + std::to_string(to));
}

ListedPort::ListedPort(const DoorWay& door, uint16_t port) : path_(door.folder + "/" + std::to_string(port)) {
  const Fd file(open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  if (!file) throw_system("write " + path_ + " (RINGDP_DOOR)", errno);
}

ListedPort::~ListedPort() {
  if (!path_.empty() && fork_generation() == generation_) unlink(path_.c_str());
}

Candidates candidates_of_peer(const std::vector<std::string>& published, bool same_network,
                              const std::vector<Interface>& mine, int lookup_ms) {
  Candidates out;
  auto add = [&](const SocketAddress& address) {
    bool own = std::any_of(mine.begin(), mine.end(), [&](const Interface& it) { return it.ip == address.ip(); });
    bool known = std::any_of(out.addresses.begin(), out.addresses.end(),
                             [&](const SocketAddress& it) { return it.text() == address.text(); });
    if (known) return;
    if (!same_network && address.is_loopback())
      out.left_out.push_back(address.text() + " (loopback does not reach another host)");
    else if (!same_network && own)
      out.left_out.push_back(address.text() + " (is an address of this host, too)");
    else
      out.addresses.push_back(address);
  };
  for (const std::string& text : published) {
    auto colon = text.rfind(':');
    if (colon == std::string::npos || text.starts_with(kRelay)) continue;
    std::string name = text.substr(0, colon);
    if (name.size() > 2 && name.front() == '[') name = name.substr(1, name.size() - 2);
    if (bytes_of(name)) {
      add(SocketAddress::parse(text));
      continue;
    }
    std::string problem;
    for (const SocketAddress& it : look_up(name, text.substr(colon + 1), lookup_ms, problem)) add(it);
    if (!problem.empty()) out.left_out.push_back(text + " (" + problem + ")");
  }
  // Addresses in a network of this host are the likeliest; they get a head start only.
  std::stable_partition(out.addresses.begin(), out.addresses.end(), [&](const SocketAddress& address) {
    return std::any_of(mine.begin(), mine.end(), [&](const Interface& it) {
      return !it.is_loopback && in_network(address.ip(), it.ip, it.prefix_bits);
    });
  });
  return out;
}

}  // namespace ringdp
