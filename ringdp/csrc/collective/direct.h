// DirectTransfer: each member sends pieces straight to other members, which receive them in place. Barrier, direct
// all-gather and flat broadcast are lists of such pieces. One step; the bytes are those of the lists.
// Owner and thread: as every Operation (operation.h).
#pragma once

#include "collective/operation.h"
#include "collective/scattered.h"

namespace ringdp {

class DirectTransfer final : public Operation {
 public:
  struct Piece {
    int member;
    Scattered memory;  // if empty, one empty frame is sent
  };

  DirectTransfer(GroupView group, OperationShape shape, std::string name, std::vector<Piece> outgoing,
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
