// ReplicaHash: hashes of tensors that should be equal on all ranks, of whole tensors or of a part of all their bytes.
// Owned by Python (ringdp/ddp/divergence), called between steps by the thread that trains, without the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ringdp {

class ReplicaHash {
 public:
  // Strided tensors on the CPU; others are an Error(kValue) that names the index.
  explicit ReplicaHash(std::vector<at::Tensor> tensors);

  // The hash of the `part`-th of `parts` about equal parts of all tensors' concatenated bytes: the sum of the hashes
  // of its pieces, one for each tensor, so that their order does not matter.
  uint64_t part(std::size_t part, std::size_t parts) const;
  // The tensors with bytes in that part: the first one, and one past the last.
  std::pair<std::size_t, std::size_t> tensors_in(std::size_t part, std::size_t parts) const;
  std::vector<uint64_t> each() const;
  std::size_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }

 private:
  // Calls visit(tensor, begin, end) for the bytes of each tensor in a part.
  template <class Visit>
  void for_pieces(std::size_t part, std::size_t parts, Visit visit) const;

  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> ends_;  // the end of each tensor in the concatenated bytes
};

}  // namespace ringdp
