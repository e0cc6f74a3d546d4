#include "collective/host_map.h"

#include <algorithm>

#include "base/bytes.h"

namespace ringdp {

uint64_t host_digest(const GroupView& group) {
  const std::vector<int>& hosts = group.hosts;
  bool one = std::all_of(hosts.begin(), hosts.end(), [](int host) { return host == 0; });
  if (one) return 0;
  const uint64_t digest = hash_bytes(std::as_bytes(std::span(hosts)), hash_text("hosts"));
  return group.weights.empty() ? digest : hash_bytes(std::as_bytes(std::span(group.weights)), digest);
}

HostMap::HostMap(const GroupView& group) : ranks(group.size), weights(group.weights) {
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
