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

}  // namespace ringdp
