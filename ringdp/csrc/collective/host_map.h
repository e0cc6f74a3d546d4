// Which members of a group share a host, from GroupView::hosts. The same on all members. Any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collective/operation.h"

namespace ringdp {

// For OperationShape::layout_hash: 0 on one host, otherwise a hash of the map and of the hosts' weights.
uint64_t host_digest(const GroupView& group);

struct HostMap {
  explicit HostMap(const GroupView& group);

  int count() const { return static_cast<int>(members.size()); }
  const std::vector<int>& local() const { return members[static_cast<std::size_t>(here)]; }
  // The member that carries a share of the buffer on a host.
  int carrier(int host, int share) const {
    const auto& local = members[static_cast<std::size_t>(host)];
    return local[static_cast<std::size_t>(share) % local.size()];
  }

  std::vector<std::vector<int>> members;  // [host]: members of the group, in rank order
  int here = 0;                           // this rank's host
  int place = 0;                          // and its place in `local()`
  int most = 0;                           // members of the host that has most
  int ranks = 0;                          // of the group
  Weights weights;                        // as in GroupView
};

}  // namespace ringdp
