// Send and Receive: one message from one member to another. They are outside the order of the group's collectives and
// are matched by (from, to, tag) and a count (engine/group_state.h), so no order of legal calls blocks. A message
// above kSmallFlowBytes waits for its receiver; a smaller one is stored there, within the eager window.
#pragma once

#include "collective/operation.h"

namespace ringdp {

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
