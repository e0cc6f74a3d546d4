#include "collective/chain.h"

#include <algorithm>

namespace ringdp {

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

}  // namespace ringdp
