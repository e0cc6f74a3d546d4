// Pairwise exchange: every rank sends each chunk of its input to the chunk's owner, who adds all of them in rank order
// (half types in float32, rounded once). That is reduce-scatter; for all-reduce the owner then sends the result to all.
// n-1 messages per phase in one step; bytes as in a ring: (n-1)/n·S per phase.
#pragma once

#include "collective/operation.h"
#include "collective/rank_fold.h"

namespace ringdp {

class Pairwise final : public Operation {
 public:
  // All-reduce: `chunks[c]` of the buffer in place; `out` is empty.
  // Reduce-scatter: `chunks[c]` of the input, left as they are; `out` receives chunk `rank`.
  Pairwise(GroupView group, OperationShape shape, std::string name, std::vector<std::span<std::byte>> chunks,
           std::span<std::byte> out);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;

 protected:
  void prepare() override;
  bool finished() const override { return fold_.folded() == own_out_.size(); }

 private:
  void advance();
  uint64_t receive_window(uint64_t total) const;

  std::vector<std::span<std::byte>> chunks_;
  bool share_;                    // all-reduce: results go back to everybody
  std::span<std::byte> own_out_;  // where this rank's chunk is summed
  RankOrderFold fold_;
};

}  // namespace ringdp
