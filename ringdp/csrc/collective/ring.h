// Ring: blocks travel from neighbour to neighbour. All-reduce: each block goes round once being summed, and once being
// copied (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009):
// 2(n-1) steps, 2(n-1)/n of the buffer sent by each rank. All-gather: the second half alone, n-1 steps.
// Block c starts at rank c and moves right: x_c + x_{c+1} + … (ranks modulo n), so the
// bits depend on index, count and world only.
#pragma once

#include "collective/operation.h"
#include "kernels/kernels.h"

namespace ringdp {

class Ring final : public Operation {
 public:
  // `blocks[c]`: block c in place, sizes equal on all ranks. With `reduce` the blocks of all ranks are combined (all-reduce),
  // without it block r comes from rank r (all-gather).
  Ring(GroupView group, OperationShape shape, std::string name, std::vector<std::span<std::byte>> blocks, bool reduce);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;

 protected:
  void prepare() override;

 private:
  // A stream is a sequence of blocks; finds the one that holds `offset`. Offsets only grow, so the search resumes.
  struct Cursor {
    int step = 0;
    uint64_t begin = 0;
  };
  struct Place {
    int step;
    std::span<std::byte> rest;  // of the block, from the offset on
  };

  int out_block(int step) const { return (group_.rank - step % group_.size + group_.size) % group_.size; }
  int in_block(int step) const { return (group_.rank - 1 - step % group_.size + 2 * group_.size) % group_.size; }
  Place locate(Cursor& cursor, uint64_t offset, bool sending) const;

  std::vector<std::span<std::byte>> blocks_;
  int reduce_steps_;
  int steps_;
  const ReduceKernels* kernels_ = nullptr;
  std::size_t element_bytes_;
  ScratchPool::Block segment_;
  Cursor out_;
  Cursor in_;
};

}  // namespace ringdp
