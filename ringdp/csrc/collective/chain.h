// Chain: broadcast along the ranks, root first. Each rank passes segments on while more arrive. Every rank but the last
// sends S bytes, and the whole takes n-2 segments longer than a single transfer: for large buffers.
// Owner and thread: as every Operation (operation.h).
#pragma once

#include "collective/operation.h"

namespace ringdp {

class Chain final : public Operation {
 public:
  Chain(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;

 protected:
  void prepare() override;

 private:
  std::span<std::byte> memory_;
};

}  // namespace ringdp
