// Halving: recursive halving and doubling for any number of ranks (the circulant scheme of Träff, "Optimal,
// Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024, with distances that are powers of two): for medium
// buffers of many ranks. The buffer has a block for each rank. Each step gives the farther part of the blocks that a
// rank still holds to the member `ahead`, at the step's distance, and adds what the member `behind` gives to the
// nearer part, until it holds the sum of its own block; then the same steps backwards bring the results. 2 ceil(log2 n)
// steps, 2(n-1)/n of the buffer sent by each rank, to members at ±2^k alone.
// All hosts have as many ranks. There are two levels of this: first the ranks of a host, whose number in it is their
// place, then, with a block of the buffer for each place, the hosts. So 2(h-1)/h of the buffer leave a host, however
// many ranks it has, in 2 ceil(log2 h) steps. Sums of half types travel as float32 and are rounded once, by the block's
// owner. The order of additions depends on the numbers of ranks and hosts, the count and the type only
// (docs/reference/algorithms.md). Owner and thread: as every Operation (operation.h).
//
// Invariant: positions are bytes of the buffer in an order that begins with this rank's own part: of the steps inside a
// host with its place's, the other places following as they lie in memory; of those between hosts, which begin when
// all of its place's part is summed, with its own block. Of a step's `kept` positions the first `added` hold the sum up
// to that step.
#pragma once

#include <vector>

#include "collective/operation.h"
#include "collective/scattered.h"
#include "kernels/kernels.h"

namespace ringdp {

class Halving final : public Operation {
 public:
  // All-reduce of two ranks and more: `memory` in place.
  Halving(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  void flushed(SendFlow&) override {}
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;
  bool take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) override;

 protected:
  void prepare() override;
  bool finished() const override { return final(0) == memory_.size(); }

 private:
  struct Step {
    const Scattered* order;  // the memory in the order of its positions
    int ahead;               // the member that gets the positions [begin, end) of this rank, and sends their results
    int behind;              // whose sums this rank adds to its positions [0, kept)
    std::size_t begin, end, kept;
    std::size_t scale = 1;      // bytes of a sum on its way for each byte of the buffer
    std::size_t come = 0;       // of `kept`, from `behind`
    std::size_t added = 0;      // of these
    std::size_t results = 0;    // of [begin, end), from `ahead`
    ScratchPool::Block room{};  // for sums that come before they can be added: two blocks, or all if that is less
    std::size_t given() const { return (end - begin) * scale; }  // bytes to `ahead`
    std::size_t taken() const { return kept * scale; }           // bytes from `behind`
  };
  // A stream to a member has what the step in which it is ahead gives, then the results that it gets as the one behind.
  struct Peer {
    int member;
    Step* ahead = nullptr;   // the step in which it is ahead; null: in none
    Step* behind = nullptr;  // and behind
    SendFlow* to = nullptr;
    RecvFlow* from = nullptr;
    std::size_t given() const { return ahead != nullptr ? ahead->given() : 0; }
    std::size_t taken() const { return behind != nullptr ? behind->taken() : 0; }
  };

  void lay_out();
  Peer& peer(int member);
  bool half() const { return wide_ != nullptr; }
  std::size_t offset_of(std::span<const std::byte> part) const {
    return static_cast<std::size_t>(part.data() - memory_.data());
  }
  float* sum_of(std::span<const std::byte> part) const {  // of half types
    return reinterpret_cast<float*>(sums_.get() + 2 * offset_of(part));
  }
  std::size_t number(const Step& step) const { return static_cast<std::size_t>(&step - steps_.data()); }
  std::size_t due(std::size_t step) const;    // its positions with the sum of all steps before it
  std::size_t final(std::size_t step) const;  // its positions with results
  uint64_t window(const Peer& from) const;
  void advance();
  void add(Step& step, const std::byte* data, std::size_t bytes);
  void go_on();

  const std::span<std::byte> memory_;
  Scattered inside_, between_;  // orders of the positions
  std::vector<Step> steps_;     // inside a host, then between hosts
  std::size_t first_between_ = 0;
  std::vector<Peer> peers_;
  const std::size_t element_bytes_;
  const ReduceKernels& kernels_;
  const ReduceKernels* wide_ = nullptr;  // of half types: adds sums in float32
  ScratchPool::Block sums_{};            // of half types, in float32, as the memory
};

}  // namespace ringdp
