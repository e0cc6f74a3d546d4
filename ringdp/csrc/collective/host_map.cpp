#include "collective/host_map.h"

#include <algorithm>

#include "base/bytes.h"

namespace ringdp {

uint64_t host_digest(std::span<const int> hosts) {
  bool one = std::all_of(hosts.begin(), hosts.end(), [](int host) { return host == 0; });
  return one ? 0 : hash_bytes(std::as_bytes(hosts), hash_text("hosts"));
}

HostMap::HostMap(const GroupView& group) : ranks(group.size) {
  for (int member = 0; member < group.size; ++member) {
    auto host = static_cast<std::size_t>(group.hosts[static_cast<std::size_t>(member)]);
    members.resize(std::max(members.size(), host + 1));
    if (member == group.rank) {
      here = static_cast<int>(host);
      place = static_cast<int>(members[host].size());
    }
    members[host].push_back(member);
    most = std::max(most, static_cast<int>(members[host].size()));
  }
}

}  // namespace ringdp
