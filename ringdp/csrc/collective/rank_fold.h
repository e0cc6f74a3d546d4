// RankOrderFold: adds up what n ranks have for the same elements, in rank order, segment by segment, without keeping more
// than two blocks per peer. Half types are added in float32 and rounded once. Used by the algorithms in which one rank sees
// all inputs (fold, pairwise).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collective/finite.h"
#include "collective/scratch.h"
#include "kernels/kernels.h"

namespace ringdp {

class RankOrderFold {
 public:
  // Frames never cross a multiple of this, so that each has its place in one of a peer's two blocks.
  static constexpr std::size_t kBlockBytes = 128 * 1024;

  // `rank` of `size` is this rank's place in the order. The mean divides by `divisor` (1: not here).
  RankOrderFold(int rank, int size, DType dtype, ReduceOp op, int divisor);

  // `own` and `out` may be the same memory, and are it if there is nobody else (but for half types). Both [bytes]. All of
  // `own` counts as there; where it comes later, that is told by `received` like everybody's.
  void begin(ScratchPool& pool, std::span<const std::byte> own, std::span<std::byte> out);

  // What is folded is shown to them; null: it is not this rank's input, or not what the result is.
  void watch(FiniteWatch* own, FiniteWatch* result) { watch_own_ = own, watch_result_ = result; }

  // Room for `length` bytes of rank `member` at `offset`; empty if they cross a block's end.
  std::span<std::byte> room(int member, uint64_t offset, std::size_t length);
  void received(int member, uint64_t upto) { upto_[member] = upto; }

  // The next bytes of the only other rank, where they lie: folded at once, nothing is kept. False: not these, not now, or
  // there are more ranks; they then go to their room.
  bool take(int member, uint64_t offset, std::span<const std::byte> data, uint64_t limit);

  // Folds what all ranks have sent, not beyond `limit`. Returns how far the result reaches.
  uint64_t advance(uint64_t limit);
  uint64_t window() const;  // how far peers may send now
  uint64_t folded() const { return folded_; }

 private:
  const std::byte* source(int member, uint64_t offset) const;
  void fold_wide(uint64_t begin, std::size_t bytes);
  void fold_half(uint64_t begin, std::size_t bytes);

  int rank_;
  int size_;
  std::size_t element_bytes_;
  std::size_t divisor_;
  const ReduceKernels& kernels_;
  std::span<const std::byte> own_;
  std::span<std::byte> out_;
  uint64_t block_bytes_ = 0;  // kBlockBytes, or the whole if that is smaller
  std::vector<ScratchPool::Block> slots_;
  ScratchPool::Block sum_;
  std::vector<uint64_t> upto_;
  uint64_t folded_ = 0;
  FiniteWatch* watch_own_ = nullptr;
  FiniteWatch* watch_result_ = nullptr;
  std::span<const std::byte> lent_;  // during `take`: the other rank's bytes at `folded_`
  uint64_t lent_at_ = 0;
};

}  // namespace ringdp
