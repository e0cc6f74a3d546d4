#include "mesh/host.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>

#include "base/error.h"
#include "transport/tcp.h"

namespace ringdp {

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

std::string host_identity(const std::string& host_id) {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat net{};
  std::string space = stat("/proc/self/ns/net", &net) == 0 ? std::to_string(net.st_ino) : "?";
  return boot + "/" + space + "/" + host_id;
}

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw_system("list the network interfaces", errno);
  std::vector<Interface> v4, v6;
  for (ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    if (it->ifa_addr == nullptr || (it->ifa_flags & IFF_UP) == 0) continue;
    bool loopback = (it->ifa_flags & IFF_LOOPBACK) != 0;
    if (it->ifa_addr->sa_family == AF_INET) {
      v4.push_back({it->ifa_name, SocketAddress::from_raw(it->ifa_addr, sizeof(sockaddr_in)).ip(), loopback});
    } else if (it->ifa_addr->sa_family == AF_INET6) {
      auto* raw = reinterpret_cast<const sockaddr_in6*>(it->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&raw->sin6_addr)) continue;
      v6.push_back({it->ifa_name, SocketAddress::from_raw(it->ifa_addr, sizeof(sockaddr_in6)).ip(), loopback});
    }
  }
  freeifaddrs(list);
  v4.insert(v4.end(), v6.begin(), v6.end());
  return v4;
}

}  // namespace ringdp
