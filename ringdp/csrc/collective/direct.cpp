#include "collective/direct.h"

#include <algorithm>

namespace ringdp {
namespace {

std::span<std::byte> part_of(const std::vector<DirectTransfer::Piece>& pieces, int member, uint64_t offset,
                             std::size_t most) {
  auto it = std::find_if(pieces.begin(), pieces.end(), [&](const auto& piece) { return piece.member == member; });
  return it == pieces.end() ? std::span<std::byte>{} : it->memory.at(offset, most);
}

}  // namespace

DirectTransfer::DirectTransfer(GroupView group, OperationShape shape, std::string name, std::vector<Piece> outgoing,
                               std::vector<Piece> incoming)
    : Operation(std::move(group), shape, std::move(name)), out_(std::move(outgoing)), in_(std::move(incoming)) {
  for (const auto* pieces : {&out_, &in_})
    for (const Piece& piece : *pieces)
      for (auto place : piece.memory.places()) uses(place);
}

void DirectTransfer::prepare() {
  for (const Piece& piece : in_) add_receive(piece.member, piece.memory.size(), piece.memory.size());
  for (const Piece& piece : out_) add_send(piece.member, piece.memory.size(), piece.memory.size()).lasting = true;
}

std::span<const std::byte> DirectTransfer::outgoing(SendFlow& flow, uint64_t offset, std::size_t max) {
  return part_of(out_, flow.member, offset, max);
}

std::span<std::byte> DirectTransfer::incoming(RecvFlow& flow, uint64_t offset, std::size_t length) {
  return part_of(in_, flow.member, offset, length);
}

Chain::Chain(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory)
    : Operation(std::move(group), shape, std::move(name)), memory_(memory) {
  uses(memory);
}

void Chain::prepare() {
  int root = identity().shape.root;
  int place = (group_.rank - root + group_.size) % group_.size;  // in the chain
  if (place > 0) add_receive((group_.rank + group_.size - 1) % group_.size, memory_.size(), memory_.size());
  if (place < group_.size - 1)
    add_send((group_.rank + 1) % group_.size, memory_.size(), place == 0 ? memory_.size() : 0).lasting = true;
}

std::span<const std::byte> Chain::outgoing(SendFlow&, uint64_t offset, std::size_t max) {
  return memory_.subspan(offset, std::min<std::size_t>(max, memory_.size() - offset));
}

std::span<std::byte> Chain::incoming(RecvFlow&, uint64_t offset, std::size_t length) {
  return memory_.subspan(offset, length);
}

void Chain::arrived(RecvFlow& flow, uint64_t, std::span<std::byte> data) {
  watch_.result(data);
  if (!sends_.empty()) sends_.front().ready = flow.received;
}

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
