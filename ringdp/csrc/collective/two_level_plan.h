// AllReducePlan: the stages of an all-reduce in two levels, made from the host map, the element count and the type.
//
// The buffer is cut into shares, h blocks each (h hosts). Share s is carried on host H by that host's rank number s
// modulo its number of ranks. Three things happen to it:
//   inside    the ranks of a host send their part to the host's carrier, which adds up in rank order;
//   between   the carriers of the hosts go round a ring with it (wide types), or exchange its blocks (half types; all
//     types between far hosts);
//   result    each carrier passes finished blocks on to the other ranks of its host.
// All stages have one order, by `turn`, in which later shares begin while earlier ones are between hosts. A turn needs
// results of earlier turns only, and every stream is in that order, so the oldest missing piece can always move: no
// deadlock. Owned by one operation, whose thread uses it.
#pragma once

#include <span>
#include <vector>

#include "base/types.h"
#include "collective/chunks.h"
#include "collective/host_map.h"
#include "collective/stages.h"

namespace ringdp {

class AllReducePlan final : public StagePlan {
 public:
  AllReducePlan(const HostMap& hosts, std::span<std::byte> memory, DType dtype, ReduceOp op, bool far = false);

 private:
  using Step = int;  // of a share between hosts, from 0

  void make_inside(int share);
  void make_ring_step(int share, Step step);
  void make_exchange_step(int share, Step step);
  void make_results(int share, Step step);
  std::vector<int> finished_blocks(Step step) const;  // on this host, by that step

  int carrier(int host, int share) const { return hosts_.carrier(host, share); }
  bool carries(int share) const { return share % static_cast<int>(hosts_.local().size()) == hosts_.place; }
  int host_after(int host, int steps) const {
    return ((host + steps) % hosts_.count() + hosts_.count()) % hosts_.count();
  }
  std::span<std::byte> block(int share, int number) const;
  Stage*& latest(int share, int number);  // of a share that this rank carries

  const HostMap& hosts_;
  const std::span<std::byte> memory_;
  const std::size_t element_bytes_;
  const bool half_;
  const bool in_pairs_;  // between hosts
  const int ranks_;      // of the group, if the result is their mean; else 1
  const int share_count_;
  const int steps_;
  const Chunks shares_;
  std::vector<Stage*> latest_;
};

}  // namespace ringdp
