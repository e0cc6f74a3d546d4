// Exchange: every member sends some bytes straight to some others and receives some straight into place. Barrier, direct
// all-gather, flat broadcast are tables of such pieces. One step; bytes as the tables say.
#pragma once

#include "collective/operation.h"

namespace ringdp {

class Exchange final : public Operation {
 public:
  struct Piece {
    int member;
    std::span<std::byte> memory;  // may be empty: then one empty frame still crosses
  };

  Exchange(GroupView group, OperationShape shape, std::string name, std::vector<Piece> outgoing,
           std::vector<Piece> incoming);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow&, uint64_t, std::span<std::byte> data) override { watch_.result(data); }

 protected:
  void prepare() override;

 private:
  std::vector<Piece> out_;
  std::vector<Piece> in_;
};

}  // namespace ringdp
