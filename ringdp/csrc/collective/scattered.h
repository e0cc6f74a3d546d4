// Where the parts of a buffer lie: cut from one piece of memory (Chunks), or put together of several (Scattered).
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "base/types.h"
#include "collective/owner_weights.h"

namespace ringdp {

// Chunks: how a buffer is cut into parts, equal ones or by weight. They begin at multiples of 16 elements, so that
// loads stay aligned; the last ones may be shorter or empty. Part of what fixes the order of summation
// (docs/reference/algorithms.md). Value type, any thread.
class Chunks {
 public:
  Chunks(std::size_t bytes, int parts, std::size_t element_bytes, std::span<const uint32_t> weights = {})
      : bytes_(bytes) {
    std::size_t count = bytes / element_bytes, n = static_cast<std::size_t>(parts);
    each_ = ((count + n - 1) / n + kElements - 1) / kElements * kElements * element_bytes;
    if (weights.empty()) return;
    begins_ = weighted_bounds((count + kElements - 1) / kElements, weights, 0);
    for (std::size_t& begin : begins_) begin = std::min(begin * kElements * element_bytes, bytes);
  }
  std::size_t begin(int part) const {
    const auto p = static_cast<std::size_t>(part);
    return begins_.empty() ? std::min(p * each_, bytes_) : begins_[p];
  }
  std::size_t size(int part) const { return begin(part + 1) - begin(part); }

 private:
  static constexpr std::size_t kElements = 16;

  std::size_t bytes_;
  std::size_t each_;
  std::vector<std::size_t> begins_;  // by weight; and the end
};

inline std::vector<std::span<std::byte>> split(std::span<std::byte> memory, int parts, DType dtype,
                                               std::span<const uint32_t> weights = {}) {
  Chunks chunks(memory.size(), parts, dtype_size(dtype), weights);
  std::vector<std::span<std::byte>> out;
  for (int part = 0; part < parts; ++part) out.push_back(memory.subspan(chunks.begin(part), chunks.size(part)));
  return out;
}

// Scattered: several pieces of memory as one byte range; usually a single piece, for which it does not allocate. It
// owns the list of the places, not their bytes. Value type, any thread.
class Scattered {
 public:
  Scattered() = default;
  Scattered(std::span<std::byte> place) { add(place); }

  void add(std::span<std::byte> place) {
    if (place.empty()) return;
    if (size_ == 0) {
      only_ = place;
    } else {
      if (places_.empty()) {
        places_.push_back(only_);
        begins_.push_back(0);
      }
      places_.push_back(place);
      begins_.push_back(size_);
    }
    size_ += place.size();
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::span<const std::span<std::byte>> places() const {  // valid as long as this object is, and not added to
    if (places_.empty()) return {&only_, static_cast<std::size_t>(size_ > 0)};
    return places_;
  }

  // The contiguous bytes from `offset` on; at most `most`.
  std::span<std::byte> at(std::size_t offset, std::size_t most) const {
    if (offset >= size_) return {};
    if (places_.empty()) return only_.subspan(offset, std::min(most, size_ - offset));
    const auto behind = std::upper_bound(begins_.begin(), begins_.end(), offset);
    const auto index = static_cast<std::size_t>(behind - begins_.begin()) - 1;
    const std::span<std::byte> rest = places_[index].subspan(offset - begins_[index]);
    return rest.first(std::min(most, rest.size()));
  }

 private:
  std::span<std::byte> only_;                 // if there is one place
  std::vector<std::span<std::byte>> places_;  // if there are several
  std::vector<std::size_t> begins_;           // the offset of each in the range
  std::size_t size_ = 0;
};

// For each part the pieces `lists[i][part]` of all lists, together.
inline std::vector<Scattered> by_part(const std::vector<std::vector<std::span<std::byte>>>& lists, std::size_t parts) {
  std::vector<Scattered> out(parts);
  for (const auto& list : lists)
    for (std::size_t part = 0; part < parts; ++part) out[part].add(list[part]);
  return out;
}

}  // namespace ringdp
