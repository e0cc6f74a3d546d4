#include "collective/point_to_point.h"

#include <algorithm>

namespace ringdp {

Send::Send(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory, int to)
    : Operation(std::move(group), shape, std::move(name)), memory_(memory), ends_{true, group_.rank, to, shape.root} {
  uses(memory);
  mutable_identity().between = "from rank " + std::to_string(ends_.from) + " to rank " + std::to_string(ends_.to);
  // A member that receives from any rank must see the message before it can grant it.
  if (memory.size() > kSmallFlowBytes) announces_to(to);
}

void Send::prepare() { add_send(ends_.to, memory_.size(), memory_.size()).lasting = true; }

std::span<const std::byte> Send::outgoing(SendFlow&, uint64_t offset, std::size_t max) {
  return memory_.subspan(offset, std::min<std::size_t>(max, memory_.size() - offset));
}

Receive::Receive(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory, int from)
    : Operation(std::move(group), shape, std::move(name)), memory_(memory) {
  ends_ = {false, PointToPoint::kAny, group_.rank, shape.root};
  uses(memory);
  mutable_identity().shape.what = Collective::kRecv;  // for texts; the fingerprint is that of the matching send
  bind(from);
}

void Receive::bind(int from) {
  ends_.from = from;
  std::string source = from == PointToPoint::kAny ? "any rank" : "rank " + std::to_string(from);
  mutable_identity().between = "from " + source + " to rank " + std::to_string(ends_.to);
}

void Receive::prepare() { add_receive(ends_.from, memory_.size(), memory_.size()); }

std::span<std::byte> Receive::incoming(RecvFlow&, uint64_t offset, std::size_t length) {
  return memory_.subspan(offset, length);
}

}  // namespace ringdp
