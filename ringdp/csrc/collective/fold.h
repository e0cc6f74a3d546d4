// Fold ("gather and fold"): every rank sends its whole input to every other (all-reduce) or to the root (reduce), and
// each receiver adds all inputs in rank order. One step, (n-1)·S bytes sent by each rank: for small buffers, which
// latency bounds, and for two ranks, where it costs no more bytes than a ring. In a reduce each sends S, the root
// receives (n-1)·S. Owner and thread: as every Operation (operation.h).
#pragma once

#include "collective/operation.h"
#include "collective/rank_fold.h"

namespace ringdp {

class Fold final : public Operation {
 public:
  // All-reduce, or with `shape.root` reduce: then `memory` receives the result on the root and is not changed
  // elsewhere.
  Fold(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  void flushed(SendFlow& flow) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;
  bool take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) override;
  void more_came() override;

 protected:
  void prepare() override;
  bool starts_early() const override { return true; }
  bool finished() const override { return !folds(group_.rank) || fold_.folded() == memory_.size(); }

 private:
  void advance();
  uint64_t sent_to_all() const;
  void widen_from(uint64_t before);
  bool folds(int member) const { return identity().shape.root < 0 || member == identity().shape.root; }

  std::span<std::byte> memory_;
  RankOrderFold fold_;
};

}  // namespace ringdp
