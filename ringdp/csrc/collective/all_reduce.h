// An algorithm as an all-reduce: when it fits, and the operation that runs it. Each is defined in the algorithm's own
// file; algorithms.def lists them. Constant data; any thread.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "collective/algorithm_table.h"
#include "collective/operation.h"

namespace ringdp {

struct AllReduceRequest {
  const AlgorithmTable& table;
  std::span<const int> hosts;  // as in layout_of
  DType dtype;
  std::size_t bytes;
  bool rank_order = false;  // as in GroupView

  int world() const { return static_cast<int>(hosts.size()); }
};

struct AllReduceAlgorithm {
  Algorithm id;
  bool (*fits)(const AllReduceRequest& request);
  // For two ranks and more. `memory` is input and result.
  std::unique_ptr<Operation> (*make)(const GroupView& group, const OperationShape& shape, std::string name,
                                     std::span<std::byte> memory);
};

#define RINGDP_ALL_REDUCE(algorithm, number, name) extern const AllReduceAlgorithm k##algorithm##AllReduce;
#define RINGDP_ALGORITHM(algorithm, number, name)
#include "collective/algorithms.def"

std::span<const AllReduceAlgorithm* const> all_reduces();  // in the order of algorithms.def
// The first of them that fits.
const AllReduceAlgorithm& find_all_reduce(const AllReduceRequest& request);

}  // namespace ringdp
