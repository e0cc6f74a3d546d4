// Pairwise exchange: every rank sends each chunk of its input to the chunk's owner, which adds all of them in rank
// order (half types in float32, rounded once). That is reduce-scatter; for all-reduce the owner then sends the result
// to all, for reduce to the root. n-1 messages per phase in one step; bytes as in a ring: (n-1)/n·S per phase (reduce:
// the second phase is S/n to send, and (n-1)/n·S for the root to receive). Owner and thread: as every Operation
// (operation.h).
#pragma once

#include "collective/operation.h"
#include "collective/rank_fold.h"
#include "collective/scattered.h"

namespace ringdp {

class Pairwise final : public Operation {
 public:
  // All-reduce: `chunks[c]` of the buffer in place; `out` is empty. Reduce: the same, but only the root's chunks
  // change. Reduce-scatter: `chunks[c]` of the input, left as they are; `out` receives chunk `rank`. Of several
  // tensors at once a chunk lies in several places, on all ranks in as many of the same sizes.
  Pairwise(GroupView group, OperationShape shape, std::string name, std::vector<Scattered> chunks, Scattered out);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;
  bool take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) override;
  void more_came() override;

 protected:
  void prepare() override;
  bool starts_early() const override { return true; }
  bool finished() const override { return fold_.folded() == own_out_.size(); }

 private:
  void advance();
  void go_on_from(uint64_t before);
  uint64_t ready(int member) const;  // how many bytes of the flow to it can be sent
  bool collects(int member) const;   // it receives the results of all chunks
  uint64_t receive_window(uint64_t total) const;
  std::size_t here(const Scattered& input) const;  // how many of its bytes, from the start, have come from the device

  std::vector<Scattered> chunks_;
  ScratchPool::Block scratch_;  // reduce: this rank's part of the sum, to be sent to the root
  Scattered own_out_;           // where this rank's chunk is summed
  RankOrderFold fold_;
};

}  // namespace ringdp
