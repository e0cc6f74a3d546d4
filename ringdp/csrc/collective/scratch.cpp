#include "collective/scratch.h"

#include <algorithm>
#include <bit>
#include <new>

namespace ringdp {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

ScratchPool::~ScratchPool() {
  for (Kept& block : kept_) ::operator delete(block.memory, kAlignment);
}

// Sizes are powers of two, so that few different blocks serve all operations.
ScratchPool::Block ScratchPool::take(std::size_t bytes) {
  bytes = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
  if (nowhere_ != nullptr) return Block(nowhere_, Release{this, bytes});
  auto it = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& block) { return block.bytes == bytes; });
  if (it == kept_.end()) return Block(static_cast<std::byte*>(::operator new(bytes, kAlignment)), Release{this, bytes});
  std::byte* memory = it->memory;
  kept_bytes_ -= bytes;
  kept_.erase(it);
  return Block(memory, Release{this, bytes});
}

void ScratchPool::give_back(std::byte* memory, std::size_t bytes) {
  if (nowhere_ != nullptr) return;
  if (kept_bytes_ + bytes > kKeptBytes) return ::operator delete(memory, kAlignment);
  kept_.push_back({memory, bytes});
  kept_bytes_ += bytes;
}

}  // namespace ringdp
