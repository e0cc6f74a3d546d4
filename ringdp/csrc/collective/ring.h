// Ring: blocks travel from neighbour to neighbour. All-reduce: each block goes round once being summed, and once being
// copied (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009):
// 2(n-1) steps, 2(n-1)/n of the buffer sent by each rank. All-gather: the second half alone, n-1 steps. A large buffer
// is cut into slabs that follow each other one step apart, so that a rank forwards bytes that are still in its cache.
// Block c of a slab starts at rank c and moves right: x_c + x_{c+1} + … (ranks modulo n), so the bits depend on index,
// count and world only. Owner and thread: as every Operation (operation.h).
#pragma once

#include "collective/operation.h"
#include "kernels/kernels.h"

namespace ringdp {

class Ring final : public Operation {
 public:
  // `slabs[s][c]`: block c of slab s in place, sizes equal on all ranks. With `reduce` the blocks of all ranks are
  // combined (all-reduce), without it block r comes from rank r (all-gather).
  Ring(GroupView group, OperationShape shape, std::string name, std::vector<std::vector<std::span<std::byte>>> slabs,
       bool reduce);

  bool read_from(std::span<const std::byte> input) override;
  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;
  bool take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) override;
  void more_came() override;

 protected:
  void prepare() override;
  bool starts_early() const override;
  bool multiplies_as_it_goes() const override;

 private:
  // Both directions carry the same sequence of (slab, step); the blocks differ.
  struct Leg {
    int slab;
    int step;
    std::size_t after;       // the leg whose arrival makes this one ready to go out; itself for a slab's first step
    uint64_t out_begin = 0;  // place in the stream to the right
    uint64_t in_begin = 0;   // and in the one from the left
  };

  std::span<std::byte> out_block(const Leg& leg) const;
  std::span<std::byte> in_block(const Leg& leg) const;
  const Leg& leg_in(uint64_t offset);  // offsets only grow
  void add(const Leg& leg, std::size_t at, std::span<const std::byte> data);
  void combine(const Leg& leg, std::byte* own, const std::byte* data, std::size_t count) const;
  bool ends_past_caches(const Leg& leg) const;
  void lay_out();
  void make_ready(SendFlow& send, uint64_t received);
  uint64_t window() const;  // how many bytes may come from the left: the operands of their sums must be available

  std::vector<std::vector<std::span<std::byte>>> slabs_;
  std::vector<Leg> legs_;
  uint64_t out_total_ = 0;
  uint64_t in_total_ = 0;
  std::size_t out_leg_ = 0;  // positions in the streams; offsets only grow
  std::size_t in_leg_ = 0;
  std::size_t ready_leg_ = 0;
  mutable std::size_t window_leg_ = 0;  // the operands of all legs before it are available
  int reduce_steps_;
  int steps_;
  std::ptrdiff_t input_ = 0;  // distance from a block to this rank's input for it; 0: in place
  const ReduceKernels* kernels_ = nullptr;
  std::size_t element_bytes_;
  ScratchPool::Block segment_;
};

}  // namespace ringdp
