// What is chosen: which algorithm runs for which collective, size, dtype and world. A fixed table (docs/algorithms.md),
// because the order of summation, and so the bits, follow from it: never from timing. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/types.h"

namespace ringdp {

// On the wire as OperationShape::algorithm: append, never renumber.
enum class Algorithm : uint8_t { kExchange = 0, kRing = 1, kFold = 2, kPairwise = 3, kChain = 4 };

std::string_view algorithm_name(Algorithm algorithm);

// Sizes in bytes up to which an algorithm is taken.
struct AlgorithmTable {
  std::size_t fold_two_ranks_bytes = 1024 * 1024;  // two ranks: a fold sends no more than a ring and takes one step
  std::size_t fold_sent_bytes = 128 * 1024;        // more ranks: what each would send, (n-1)·S
  std::size_t flat_broadcast_bytes = 64 * 1024;
  std::size_t direct_gather_bytes = 64 * 1024;  // of one rank's block
};

// `bytes`: of the whole buffer; of an all-gather, of one rank's block.
Algorithm choose_all_reduce(const AlgorithmTable& table, int world, DType dtype, std::size_t bytes);
Algorithm choose_reduce(const AlgorithmTable& table, int world, DType dtype, std::size_t bytes);
Algorithm choose_broadcast(const AlgorithmTable& table, int world, std::size_t bytes);
Algorithm choose_all_gather(const AlgorithmTable& table, int world, std::size_t bytes);

}  // namespace ringdp
