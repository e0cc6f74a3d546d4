// Tree: a binomial tree over the members, for small buffers in groups of many members (docs/reference/algorithms.md).
// A member's place is (rank - root) modulo n; its parent is at its place without the lowest bit that is set, so that
// all edges lead to members at a distance of ±2^k. Up: each member adds its children's sums to its own input, nearest
// child first, and sends the sum to its parent. Down: the root's result goes to every member along the same edges.
// All-reduce goes up and down (root 0), reduce up, broadcast down. At most ceil(log2 n) steps each way; every member
// but the root sends the buffer up once, and the root sends it down ceil(log2 n) times. Sums of half types travel as
// float32 and are rounded once, by the root; a member without children sends its input as it is. Owner and thread: as
// every Operation (operation.h).
#pragma once

#include "collective/operation.h"
#include "kernels/kernels.h"

namespace ringdp {

class Tree final : public Operation {
 public:
  // All-reduce: `memory` in place. Reduce: `memory` is the result on the root and is not changed elsewhere. Broadcast:
  // `memory` is sent by the root and written elsewhere.
  Tree(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory);
  // A barrier, or another operation that ends when all members have begun it: one byte goes up and down, because an
  // empty flow does not wait for its sender.
  Tree(GroupView group, OperationShape shape, std::string name);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  void flushed(SendFlow& flow) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;
  void more_came() override;

 protected:
  void prepare() override;
  bool starts_early() const override { return up_; }  // a broadcast's receivers must not be overwritten by late input
  bool finished() const override { return !adds() || added_ == memory_.size(); }

 private:
  struct Child {
    int member;
    std::size_t scale;          // bytes of its stream for each byte of `memory_`
    RecvFlow* from = nullptr;   // the child's sums
    ScratchPool::Block room{};  // for `from`: two blocks, or the whole if that is less
  };

  void lay_out(int root);
  std::size_t scale_of(int place) const;  // of the sums that the member at this place sends up
  bool adds() const { return up_ && !children_.empty(); }
  std::size_t room_bytes(std::size_t scale) const;
  uint64_t window(const Child& child) const;  // how many bytes it may send
  void advance();
  void add(uint64_t begin, std::size_t bytes);
  void add_half(uint64_t begin, std::size_t count);
  void add_wide(uint64_t begin, std::size_t count);
  std::byte* sum_at(uint64_t begin) const;
  const std::byte* input_of(const Child& child, uint64_t begin) const;
  void make_ready_below(uint64_t upto);

  std::byte token_{};  // of a barrier
  const std::span<std::byte> memory_;
  const bool up_;
  const bool down_;
  const std::size_t element_bytes_;
  const ReduceKernels* kernels_ = nullptr;
  const ReduceKernels* wide_ = nullptr;  // of half types: adds sums in float32
  std::size_t divisor_ = 1;
  std::size_t block_bytes_ = 0;  // of `memory_`: frames up do not cross the end of a block
  int parent_ = -1;              // member; -1: this rank is the root
  std::size_t scale_ = 1;        // of what this rank sends up
  std::vector<Child> children_;  // nearest first
  SendFlow* to_parent_ = nullptr;
  ScratchPool::Block sums_{};  // on the way up, two blocks; on the root, float32 sums of a piece
  uint64_t added_ = 0;         // bytes of `memory_` that are summed
};

}  // namespace ringdp
