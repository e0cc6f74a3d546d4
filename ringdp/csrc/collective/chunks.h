// Chunks: how a buffer is cut into equal parts. They begin at multiples of 16 elements, so that loads stay aligned; the last
// ones may be shorter or empty. Part of what fixes the order of summation (docs/algorithms.md). Value type, any thread.
#pragma once

#include <algorithm>
#include <cstddef>

namespace ringdp {

class Chunks {
 public:
  Chunks(std::size_t bytes, int parts, std::size_t element_bytes) : bytes_(bytes) {
    std::size_t count = bytes / element_bytes, n = static_cast<std::size_t>(parts);
    each_ = ((count + n - 1) / n + kElements - 1) / kElements * kElements * element_bytes;
  }
  std::size_t begin(int part) const { return std::min(static_cast<std::size_t>(part) * each_, bytes_); }
  std::size_t size(int part) const { return begin(part + 1) - begin(part); }

 private:
  static constexpr std::size_t kElements = 16;

  std::size_t bytes_;
  std::size_t each_;
};

}  // namespace ringdp
