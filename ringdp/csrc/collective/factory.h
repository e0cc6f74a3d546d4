// Makes the operations of a group, each of the algorithm that the table chooses (algorithm_table.h). Any thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collective/algorithm_table.h"
#include "collective/compressed.h"
#include "collective/finite.h"
#include "collective/operation.h"

namespace ringdp {

// Every function makes an operation for this rank of `group`. `name` may be empty. Throws Error(kValue) for a
// reduction that the dtype does not have. A table that is the last parameter is the built-in one by default.
std::unique_ptr<Operation> make_barrier(const GroupView& group, std::string name, const AlgorithmTable& table = {});
// An operation of another backend, whose tensors do not come here: every member announces that it begins it, so that a
// disagreement of the ranks is an error. `by` is that backend's name; `layout_hash`: of anything else that must be
// equal.
struct Announcement {
  Collective what = Collective::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  uint64_t count = 0;  // elements of one rank's input
  std::string_view by;
  uint64_t layout_hash = 0;
};
std::unique_ptr<Operation> make_announcement(const GroupView& group, const Announcement& what, std::string name,
                                             const AlgorithmTable& table = {});
// `memory` is input and result. If `input` is not empty, it is the input, and is not changed.
std::unique_ptr<Operation> make_all_reduce(const AlgorithmTable& table, const GroupView& group,
                                           std::span<std::byte> memory, DType dtype, ReduceOp op, std::string name,
                                           std::span<const std::byte> input = {});
// The mean of all ranks' sections, as codes on the wire; `report` may be null. Throws Error(kValue) for invalid
// sections: see compressed.h.
std::unique_ptr<Operation> make_all_reduce_compressed(const GroupView& group, std::vector<CompressedSection> sections,
                                                      const Compression& compression,
                                                      std::shared_ptr<FiniteReport> report, std::string name);
// Adds in rank order; in a large group, if it is small, in the order of the tree (tree.h). `memory` is the result on
// the root and is not changed elsewhere.
std::unique_ptr<Operation> make_reduce(const AlgorithmTable& table, const GroupView& group, std::span<std::byte> memory,
                                       DType dtype, ReduceOp op, int root, std::string name);
std::unique_ptr<Operation> make_broadcast(const AlgorithmTable& table, const GroupView& group,
                                          std::span<std::byte> memory, DType dtype, int root, std::string name);
// `blocks[r]` receives rank r's `input`; all of the same size.
struct GatheredTensor {
  std::span<const std::byte> input;
  std::vector<std::span<std::byte>> blocks;
};
// `chunks[r]` of this rank's input go to rank r; `output` receives the reduction of all ranks' chunks for this rank.
struct ScatteredTensor {
  std::vector<std::span<std::byte>> chunks;
  std::span<std::byte> output;
};
// For one tensor, or for several in one operation; then no output may overlap another tensor's input.
std::unique_ptr<Operation> make_all_gather(const AlgorithmTable& table, const GroupView& group,
                                           const std::vector<GatheredTensor>& tensors, DType dtype, std::string name);
// Several: only if `choose_reduce_scatter` gives kPairwise for the sum of their output bytes.
std::unique_ptr<Operation> make_reduce_scatter(const AlgorithmTable& table, const GroupView& group,
                                               const std::vector<ScatteredTensor>& tensors, DType dtype, ReduceOp op,
                                               std::string name);
// Root: `blocks[r]` receives rank r's `input`; elsewhere there are none.
std::unique_ptr<Operation> make_gather(const GroupView& group, std::span<const std::byte> input,
                                       std::vector<std::span<std::byte>> blocks, DType dtype, int root,
                                       std::string name, const AlgorithmTable& table = {});
// Root: `chunks[r]` goes to rank r's `output`; elsewhere there are none.
std::unique_ptr<Operation> make_scatter(const GroupView& group, std::vector<std::span<std::byte>> chunks,
                                        std::span<std::byte> output, DType dtype, int root, std::string name,
                                        const AlgorithmTable& table = {});
// `chunks[r]` goes to rank r, which receives it in its block for this rank: every pair may have a size of its own.
std::unique_ptr<Operation> make_all_to_all(const GroupView& group, std::vector<std::span<std::byte>> chunks,
                                           std::vector<std::span<std::byte>> blocks, DType dtype, std::string name);
std::unique_ptr<Operation> make_send(const GroupView& group, std::span<std::byte> memory, DType dtype, int to,
                                     int32_t tag, std::string name);
// `from` may be PointToPoint::kAny.
std::unique_ptr<Operation> make_receive(const GroupView& group, std::span<std::byte> memory, DType dtype, int from,
                                        int32_t tag, std::string name);

}  // namespace ringdp
