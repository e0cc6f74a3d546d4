// Operations that only move bytes: straight from member to member (DirectTransfer), along a chain of them (Chain), and
// messages (Send, Receive).
#pragma once

#include "collective/operation.h"
#include "collective/scattered.h"

namespace ringdp {

// DirectTransfer: each member sends pieces straight to other members, which receive them in place. Barrier, direct
// all-gather and flat broadcast are lists of such pieces. One step; the bytes are those of the lists.
// Owner and thread: as every Operation (operation.h).
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

// Chain: broadcast along the ranks, root first. Each rank passes segments on while more arrive. Every rank but the last
// sends S bytes, and the whole takes n-2 segments longer than a single transfer: for large buffers.
// Owner and thread: as every Operation (operation.h).
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

// Send and Receive: one message from one member to another. They are outside the order of the group's collectives and
// are matched by (from, to, tag) and a count (engine/group_table.h), so no order of legal calls blocks. A message
// above kSmallFlowBytes waits for its receiver; a smaller one is stored there, within the eager window.
class Send final : public Operation {
 public:
  Send(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory, int to);

  const PointToPoint* point_to_point() const override { return &ends_; }
  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow&, uint64_t, std::size_t) override { return {}; }
  void arrived(RecvFlow&, uint64_t, std::span<std::byte>) override {}

 protected:
  void prepare() override;

 private:
  std::span<std::byte> memory_;
  PointToPoint ends_;
};

class Receive final : public Operation {
 public:
  // `from` may be PointToPoint::kAny: then `bind` must come before `start`.
  Receive(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory, int from);

  const PointToPoint* point_to_point() const override { return &ends_; }
  void bind(int from) override;
  std::span<const std::byte> outgoing(SendFlow&, uint64_t, std::size_t) override { return {}; }
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow&, uint64_t, std::span<std::byte> data) override { watch_.result(data); }

 protected:
  void prepare() override;

 private:
  std::span<std::byte> memory_;
  PointToPoint ends_;
};

}  // namespace ringdp
