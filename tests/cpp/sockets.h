// The sockets of this process, as a network sees them: those that are connected over TCP, and where it listens.
#pragma once

#include <dirent.h>
#include <sys/socket.h>

#include <cstdlib>
#include <vector>

#include "transport/tcp.h"

namespace ringdp::testing {

inline std::vector<int> descriptors() {
  std::vector<int> out;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return out;
  while (const dirent* it = readdir(folder))
    if (const int fd = std::atoi(it->d_name); it->d_name[0] != '.' && fd != dirfd(folder)) out.push_back(fd);
  closedir(folder);
  return out;
}

inline bool connected_over_tcp(int fd) {
  const int family = SocketAddress::far_end_of(fd).family();
  return family == AF_INET || family == AF_INET6;
}

inline std::vector<int> connected_sockets() {
  std::vector<int> out;
  for (const int fd : descriptors())
    if (connected_over_tcp(fd)) out.push_back(fd);
  return out;
}

inline std::vector<SocketAddress> listening_addresses() {
  std::vector<SocketAddress> out;
  for (const int fd : descriptors()) {
    int listens = 0;
    socklen_t length = sizeof(listens);
    sockaddr_storage storage{};
    socklen_t size = sizeof(storage);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) == 0 && storage.ss_family != AF_UNIX)
      out.push_back(SocketAddress::from_raw(reinterpret_cast<sockaddr*>(&storage), size));
  }
  return out;
}

}  // namespace ringdp::testing
