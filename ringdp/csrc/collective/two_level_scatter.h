// ReduceScatterPlan: the stages of a reduce-scatter in two levels. On its own host a chunk's owner adds up the host's
// parts; on every other host one rank does, its carrier, in memory of its own (inputs are not changed), and sends the
// sum to the owner, which adds the hosts' sums in the order of the hosts. It works block by block, so that a rank
// holds only a few blocks per peer. Owned by one operation, whose thread uses it.
#pragma once

#include <span>
#include <vector>

#include "base/types.h"
#include "collective/host_map.h"
#include "collective/stages.h"

namespace ringdp {

class ReduceScatterPlan final : public StagePlan {
 public:
  // `chunks[r]` for rank r, all of the size of `out`, which is not empty.
  ReduceScatterPlan(const HostMap& hosts, const std::vector<std::span<std::byte>>& chunks, std::span<std::byte> out,
                    DType dtype, ReduceOp op);

 private:
  // Of the chunk for the member with number `place` on host `home`.
  void make_block(int home, int place, std::span<std::byte> input, std::span<std::byte> out);

  const HostMap& hosts_;
  const bool half_;
  const int ranks_;  // of the group, if the result is their mean; else 1
};

}  // namespace ringdp
