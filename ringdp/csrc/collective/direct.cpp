#include "collective/direct.h"

#include <algorithm>

namespace ringdp {
namespace {

std::span<std::byte> piece_of(const std::vector<DirectTransfer::Piece>& pieces, int member) {
  auto it = std::find_if(pieces.begin(), pieces.end(), [&](const auto& piece) { return piece.member == member; });
  return it == pieces.end() ? std::span<std::byte>{} : it->memory;
}

}  // namespace

DirectTransfer::DirectTransfer(GroupView group, OperationShape shape, std::string name, std::vector<Piece> outgoing,
                               std::vector<Piece> incoming)
    : Operation(std::move(group), shape, std::move(name)), out_(std::move(outgoing)), in_(std::move(incoming)) {
  for (const Piece& piece : out_) uses(piece.memory);
  for (const Piece& piece : in_) uses(piece.memory);
}

void DirectTransfer::prepare() {
  for (const Piece& piece : in_) add_receive(piece.member, piece.memory.size(), piece.memory.size());
  for (const Piece& piece : out_) add_send(piece.member, piece.memory.size(), piece.memory.size()).lasting = true;
}

std::span<const std::byte> DirectTransfer::outgoing(SendFlow& flow, uint64_t offset, std::size_t max) {
  auto memory = piece_of(out_, flow.member);
  return memory.subspan(offset, std::min<std::size_t>(max, memory.size() - offset));
}

std::span<std::byte> DirectTransfer::incoming(RecvFlow& flow, uint64_t offset, std::size_t length) {
  return piece_of(in_, flow.member).subspan(offset, length);
}

}  // namespace ringdp
