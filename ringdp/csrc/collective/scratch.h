// ScratchPool: memory for segments in flight. It is kept and reused, so that operations do not pay for page faults.
// Owned by the Runtime; used only by the thread that drives the engine.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace ringdp {

class ScratchPool {
 public:
  // `nowhere`: all blocks are at this address, for operations whose kernels touch no memory (kernels/counting.h).
  explicit ScratchPool(std::byte* nowhere = nullptr) : nowhere_(nowhere) {}
  ~ScratchPool();

  struct Release {
    ScratchPool* pool = nullptr;
    std::size_t bytes = 0;
    void operator()(std::byte* memory) const { pool->give_back(memory, bytes); }
  };
  using Block = std::unique_ptr<std::byte, Release>;  // 64-byte aligned

  Block take(std::size_t bytes);

 private:
  static constexpr std::size_t kKeptBytes = 16 * 1024 * 1024;

  void give_back(std::byte* memory, std::size_t bytes);

  struct Kept {
    std::byte* memory;
    std::size_t bytes;
  };
  std::byte* const nowhere_;
  std::vector<Kept> kept_;
  std::size_t kept_bytes_ = 0;
};

}  // namespace ringdp
