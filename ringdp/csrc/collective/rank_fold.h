// RankOrderFold: adds the inputs of n ranks for the same elements in rank order, segment by segment, and keeps a few
// blocks per peer, as many as keep the line busy. Half types are added in float32 and rounded once. Owned by the
// operations in which one rank sees all inputs (fold, pairwise, two levels), used by the thread that drives the engine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collective/finite.h"
#include "collective/scattered.h"
#include "collective/scratch.h"
#include "kernels/kernels.h"

namespace ringdp {

class RankOrderFold {
 public:
  // Frames never cross a multiple of this, so that each has its place in one of a peer's blocks.
  static constexpr std::size_t kBlockBytes = 128 * 1024;

  // `rank` of `size` is this rank's place in the order. The mean divides by `divisor` (1: not here). `far`: as
  // GroupView's, peers may send as much as a long path holds. `in_stages`: bytes that come in rank order are added at
  // once, without a copy, to the sum of the ranks before them. Then `out` has partial sums before `folded` reports
  // them. Not for half types.
  RankOrderFold(int rank, int size, DType dtype, ReduceOp op, int divisor, bool far = false, bool in_stages = false);

  // `own` and `out` may alias. With one rank they must, except for half types. Both [bytes]. All of `own` counts as
  // received; if it comes later, from a device, call `received` as for a peer.
  void begin(ScratchPool& pool, std::span<const std::byte> own, std::span<std::byte> out);
  void begin(ScratchPool& pool, Scattered own, Scattered out);  // `own` is read only

  // Watches for the elements that are folded. Null: `own` is not this rank's input, or the sum is not the final
  // result.
  void watch(FiniteWatch* own, FiniteWatch* result) { watch_own_ = own, watch_result_ = result; }

  // Room for `length` bytes of rank `member` at `offset`; empty if they cross a block's end.
  std::span<std::byte> room(int member, uint64_t offset, std::size_t length);
  void received(int member, uint64_t upto) { upto_[member] = upto; }

  // Folds the next bytes of the only other rank without a copy; in stages, those of any rank that are next in the
  // order. False if these bytes cannot be folded now; they are then received into their room.
  bool take(int member, uint64_t offset, std::span<const std::byte> data, uint64_t limit);

  // Folds the bytes that all ranks have sent, up to `limit`. Returns how many bytes of the result are complete.
  uint64_t advance(uint64_t limit);
  uint64_t reach(uint64_t limit) const;  // what `fold` would return
  uint64_t window() const;               // how many bytes peers may send now
  uint64_t folded() const { return folded_; }

 private:
  const std::byte* source(int member, uint64_t offset) const;
  void fold_wide(uint64_t begin, std::span<std::byte> place);
  void fold_half(uint64_t begin, std::span<std::byte> place);

  // ---- In stages.
  bool take_in_stages(int member, uint64_t offset, std::span<const std::byte> data, uint64_t limit);
  void advance_in_stages(uint64_t limit);
  // up to where the ranks before it are added and its own bytes have come
  uint64_t reach_of(int member, uint64_t limit) const;
  std::size_t add(int member, uint64_t end,
                  const std::byte* data);  // adds one piece of the member's bytes; returns its length
  std::span<std::byte> sum_upto(int member, uint64_t offset,
                                std::size_t most);  // the memory of the sum up to this rank

  int rank_;
  int size_;
  std::size_t blocks_;  // of each peer
  std::size_t element_bytes_;
  std::size_t divisor_;
  const ReduceKernels& kernels_;
  Scattered own_;
  Scattered out_;
  uint64_t block_bytes_ = 0;  // kBlockBytes, or the whole if that is smaller
  std::vector<ScratchPool::Block> slots_;
  ScratchPool::Block sum_;  // of a piece: of half types in float32, of others up to the last rank but one
  std::vector<uint64_t> upto_;
  uint64_t folded_ = 0;
  const bool in_stages_;
  // by rank: how many bytes of it and all ranks before it are added; for rank 0 see `reach_of`
  std::vector<uint64_t> summed_;
  FiniteWatch* watch_own_ = nullptr;
  FiniteWatch* watch_result_ = nullptr;
  std::span<const std::byte> lent_;  // during `take`: the other rank's bytes at `folded_`
  uint64_t lent_at_ = 0;
};

}  // namespace ringdp
