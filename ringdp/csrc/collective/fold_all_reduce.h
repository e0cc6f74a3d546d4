// FoldAllReduce ("gather and fold"): every rank sends its whole input to every other and each adds all inputs in rank
// order. One step, (n-1)·S bytes sent by each rank: for what is bound by latency, and for two ranks, where it costs no more
// bytes than a ring.
#pragma once

#include "collective/operation.h"
#include "collective/rank_fold.h"

namespace ringdp {

class FoldAllReduce final : public Operation {
 public:
  FoldAllReduce(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  void flushed(SendFlow& flow) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;

 protected:
  void prepare() override;
  bool finished() const override { return fold_.folded() == memory_.size(); }

 private:
  void advance();

  std::span<std::byte> memory_;
  RankOrderFold fold_;
};

}  // namespace ringdp
