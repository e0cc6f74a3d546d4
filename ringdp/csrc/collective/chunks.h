// Chunks: how a buffer is cut into equal parts. They begin at multiples of 16 elements, so that loads stay aligned;
// the last ones may be shorter or empty. Part of what fixes the order of summation (docs/reference/algorithms.md).
// Value type, any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "base/types.h"

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

inline std::vector<std::span<std::byte>> split(std::span<std::byte> memory, int parts, DType dtype) {
  Chunks chunks(memory.size(), parts, dtype_size(dtype));
  std::vector<std::span<std::byte>> out;
  for (int part = 0; part < parts; ++part) out.push_back(memory.subspan(chunks.begin(part), chunks.size(part)));
  return out;
}

}  // namespace ringdp
