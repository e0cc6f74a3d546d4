#include "collective/factory.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/bytes.h"
#include "base/error.h"
#include "codec/plugin.h"
#include "collective/all_reduce.h"
#include "collective/compressed_all_reduce.h"
#include "collective/direct.h"
#include "collective/fold.h"
#include "collective/host_map.h"
#include "collective/pairwise.h"
#include "collective/ring.h"
#include "collective/scattered.h"
#include "collective/tree.h"
#include "collective/two_level.h"

namespace ringdp {
namespace {

OperationShape shape_of(Collective what, DType dtype, ReduceOp op, Algorithm algorithm, std::size_t bytes,
                        int root = -1) {
  OperationShape shape;
  shape.what = what;
  shape.dtype = dtype;
  shape.op = op;
  shape.algorithm = static_cast<uint8_t>(algorithm);
  shape.root = root;
  shape.count = bytes / dtype_size(dtype);
  if (bytes % dtype_size(dtype) != 0)
    throw Error(ErrorKind::kValue, std::string(collective_name(what)) + ": " + std::to_string(bytes) +
                                       " bytes: not a multiple of " + std::to_string(dtype_size(dtype)) + " (" +
                                       std::string(dtype_name(dtype)) + ")");
  return shape;
}

void check_member(const GroupView& group, int member, const char* what) {
  if (member < 0 || member >= group.size)
    throw Error(ErrorKind::kValue, std::string(what) + " " + std::to_string(member) + " is not a rank of a group of " +
                                       std::to_string(group.size));
}

// Checks that there is one piece for each rank, all of `bytes` if that is given.
void check_pieces(const GroupView& group, const std::vector<std::span<std::byte>>& pieces,
                  std::optional<std::size_t> bytes, const std::string& what) {
  if (pieces.size() != static_cast<std::size_t>(group.size))
    throw Error(ErrorKind::kValue,
                what + "s: " + std::to_string(pieces.size()) + " for " + std::to_string(group.size) + " ranks");
  for (const auto& piece : pieces)
    if (bytes && piece.size() != *bytes)
      throw Error(ErrorKind::kValue,
                  what + " of " + std::to_string(piece.size()) + " bytes beside one of " + std::to_string(*bytes));
}

// Checks that each tensor of a list has whole elements.
void check_elements(std::size_t tensors, std::size_t bytes, DType dtype, const std::string& what) {
  if (tensors > 1 && bytes % dtype_size(dtype) != 0)
    throw Error(ErrorKind::kValue, what + ": " + std::to_string(bytes) + " bytes: not a multiple of " +
                                       std::to_string(dtype_size(dtype)) + " (" + std::string(dtype_name(dtype)) + ")");
}

void check_reduction(DType dtype, ReduceOp op) { (void)reduce_kernels(dtype, op); }

void check_compression(const std::vector<CompressedSection>& sections, const Compression& compression) {
  const auto refuse = [](const std::string& why) { throw Error(ErrorKind::kValue, "compressed all_reduce: " + why); };
  (void)codec(compression.codec);
  if (compression.divisor == 0) refuse("the divisor is 0; it is the number of ranks that have input");
  if (!(compression.loss_scale > 0) || !std::isfinite(compression.loss_scale))
    refuse("the loss scale is " + std::to_string(compression.loss_scale) + "; it must be positive and finite");
  for (std::size_t i = 0; i < sections.size(); ++i) {
    const CompressedSection& it = sections[i];
    if (it.count == 0) continue;
    const std::string section = "section " + std::to_string(i);
    if (it.x == nullptr) refuse(section + " has " + std::to_string(it.count) + " elements at no address");
    if ((it.residual == nullptr) != (it.new_residual == nullptr))
      refuse(section + " has one residual; error feedback needs the old one and room for the new one");
    if (it.residual != nullptr && it.residual == it.new_residual)
      refuse(section + " would overwrite its residual; if the step is skipped, the old one still counts");
  }
}

// DirectTransfer has one type for sent and received memory; it only reads the former.
std::span<std::byte> writable(std::span<const std::byte> memory) {
  return {const_cast<std::byte*>(memory.data()), memory.size()};
}

std::vector<DirectTransfer::Piece> to_others(const GroupView& group, const Scattered& memory) {
  std::vector<DirectTransfer::Piece> out;
  for (int step = 1; step < group.size; ++step) out.push_back({(group.rank + step) % group.size, memory});
  return out;
}

// An empty frame to every other member; complete at once with one member.
std::unique_ptr<Operation> empty_exchange(const GroupView& group, const OperationShape& shape, std::string name) {
  return std::make_unique<DirectTransfer>(group, shape, std::move(name), to_others(group, {}), to_others(group, {}));
}

// An operation that ends when every member has begun it.
std::unique_ptr<Operation> word_to_all(const AlgorithmTable& table, const GroupView& group, const OperationShape& shape,
                                       std::string name) {
  if (goes_direct(table, group.size)) return empty_exchange(group, shape, std::move(name));
  return std::make_unique<Tree>(group, shape, std::move(name));
}

void announce_to_others(Operation& operation, const GroupView& group) {
  for (int step = 1; step < group.size; ++step) operation.announces_to((group.rank + step) % group.size);
}

// For a gather or scatter in a large group, called on every member: announcements of the root to all members would
// connect it to all, and its announcements to its neighbours alone would not reach members that wait for another root.
void announce_in_large_group(Operation& operation, const GroupView& group, const AlgorithmTable& table) {
  if (!goes_direct(table, group.size)) operation.announces_to_neighbours();
}

std::vector<DirectTransfer::Piece> pieces_of_others(const GroupView& group, const std::vector<Scattered>& all) {
  std::vector<DirectTransfer::Piece> out;
  for (int step = 1; step < group.size; ++step) {
    int member = (group.rank + step) % group.size;
    out.push_back({member, all[static_cast<std::size_t>(member)]});
  }
  return out;
}

}  // namespace

std::unique_ptr<Operation> make_barrier(const GroupView& group, std::string name, const AlgorithmTable& table) {
  const Algorithm algorithm = goes_direct(table, group.size) ? Algorithm::kDirectTransfer : Algorithm::kTree;
  OperationShape shape = shape_of(Collective::kBarrier, DType::kUint8, ReduceOp::kSum, algorithm, 0);
  return word_to_all(table, group, shape, std::move(name));
}

std::unique_ptr<Operation> make_announcement(const GroupView& group, const Announcement& what, std::string name,
                                             const AlgorithmTable& table) {
  OperationShape shape;
  shape.what = what.what;
  shape.dtype = what.dtype;
  shape.op = what.op;
  shape.algorithm = static_cast<uint8_t>(Algorithm::kElsewhere);
  shape.root = foreign_backend_number(what.by);
  shape.count = what.count;
  shape.layout_hash = hash_mix(hash_text(what.by), what.layout_hash);
  return word_to_all(table, group, shape, std::move(name));
}

std::unique_ptr<Operation> make_all_reduce(const AlgorithmTable& table, const GroupView& group,
                                           std::span<std::byte> memory, DType dtype, ReduceOp op, std::string name,
                                           std::span<const std::byte> input) {
  check_reduction(dtype, op);
  if (!input.empty() && input.size() != memory.size())
    throw Error(ErrorKind::kValue, "all_reduce: " + std::to_string(input.size()) + " bytes of input for a result of " +
                                       std::to_string(memory.size()));
  const AllReduceAlgorithm& algorithm = find_all_reduce({table, group.hosts, dtype, memory.size(), group.rank_order});
  OperationShape shape = shape_of(Collective::kAllReduce, dtype, op, algorithm.id, memory.size());
  shape.layout_hash = host_digest(group);
  if (group.size == 1) {
    auto alone = empty_exchange(group, shape, std::move(name));
    alone->look_at_start(memory);
    alone->copy_at_start(memory, input);
    return alone;
  }
  auto made = algorithm.make(group, shape, std::move(name), memory);
  if (!input.empty() && !made->read_from(input)) made->copy_at_start(memory, input);
  return made;
}

std::unique_ptr<Operation> make_all_reduce_compressed(const GroupView& group, std::vector<CompressedSection> sections,
                                                      const Compression& compression,
                                                      std::shared_ptr<FiniteReport> report, std::string name) {
  check_compression(sections, compression);
  std::size_t count = 0;
  uint64_t layout = hash_mix(host_digest(group), compression.divisor);
  for (const CompressedSection& section : sections) {
    count += section.count;
    layout = hash_mix(hash_mix(layout, section.count), section.owner_offset);
  }
  OperationShape shape = shape_of(Collective::kAllReduce, DType::kFloat32, ReduceOp::kAvg, Algorithm::kCompressed,
                                  count * sizeof(float), wire_number(compression.codec));
  // The codec's number is 30 bits of the library's hash; this is the whole hash.
  shape.layout_hash = is_plugin(compression.codec) ? hash_mix(layout, codec_identity(compression.codec)) : layout;
  return std::make_unique<CompressedAllReduce>(group, shape, std::move(name), std::move(sections), compression,
                                               std::move(report));
}

std::unique_ptr<Operation> make_reduce(const AlgorithmTable& table, const GroupView& group, std::span<std::byte> memory,
                                       DType dtype, ReduceOp op, int root, std::string name) {
  check_reduction(dtype, op);
  check_member(group, root, "reduce: root");
  const auto world = static_cast<std::size_t>(group.size);
  Algorithm algorithm = choose_reduce(table, group.size, memory.size());
  OperationShape shape = shape_of(Collective::kReduce, dtype, op, algorithm, memory.size(), root);
  if (group.size == 1) return empty_exchange(group, shape, std::move(name));
  if (algorithm == Algorithm::kPairwise)
    return std::make_unique<Pairwise>(group, shape, std::move(name), by_part({split(memory, group.size, dtype)}, world),
                                      Scattered());
  if (algorithm == Algorithm::kTree) return std::make_unique<Tree>(group, shape, std::move(name), memory);
  auto operation = std::make_unique<Fold>(group, shape, std::move(name), memory);
  if (group.rank == root) announce_to_others(*operation, group);
  return operation;
}

std::unique_ptr<Operation> make_broadcast(const AlgorithmTable& table, const GroupView& group,
                                          std::span<std::byte> memory, DType dtype, int root, std::string name) {
  check_member(group, root, "broadcast: root");
  Algorithm algorithm = choose_broadcast(table, group.size, memory.size());
  bool flat = algorithm == Algorithm::kDirectTransfer;
  OperationShape shape = shape_of(Collective::kBroadcast, dtype, ReduceOp::kSum, algorithm, memory.size(), root);
  if (algorithm == Algorithm::kTree) return std::make_unique<Tree>(group, shape, std::move(name), memory);
  std::unique_ptr<Operation> operation;
  if (flat) {
    std::vector<DirectTransfer::Piece> out, in;
    if (group.rank == root)
      out = to_others(group, memory);
    else
      in.push_back({root, memory});
    operation = std::make_unique<DirectTransfer>(group, shape, std::move(name), std::move(out), std::move(in));
  } else {
    operation = std::make_unique<Chain>(group, shape, std::move(name), memory);
  }
  if (group.rank != root) operation->announces_to(flat ? root : (group.rank + group.size - 1) % group.size);
  return operation;
}

std::unique_ptr<Operation> make_all_gather(const AlgorithmTable& table, const GroupView& group,
                                           const std::vector<GatheredTensor>& tensors, DType dtype, std::string name) {
  const auto world = static_cast<std::size_t>(group.size), rank = static_cast<std::size_t>(group.rank);
  std::vector<std::vector<std::span<std::byte>>> blocks;
  std::size_t bytes = 0;
  for (const GatheredTensor& tensor : tensors) {
    check_pieces(group, tensor.blocks, tensor.input.size(), "all_gather: output");
    check_elements(tensors.size(), tensor.input.size(), dtype, "all_gather");
    bytes += tensor.input.size();
    blocks.push_back(tensor.blocks);
  }
  Algorithm algorithm = choose_all_gather(table, group.size, bytes);
  OperationShape shape = shape_of(Collective::kAllGather, dtype, ReduceOp::kSum, algorithm, bytes);
  if (tensors.size() > 1)
    for (const GatheredTensor& tensor : tensors) shape.layout_hash = hash_mix(shape.layout_hash, tensor.input.size());
  std::unique_ptr<Operation> operation;
  if (algorithm == Algorithm::kDirectTransfer) {
    const std::vector<Scattered> by_rank = by_part(blocks, world);
    operation = std::make_unique<DirectTransfer>(group, shape, std::move(name), to_others(group, by_rank[rank]),
                                                 pieces_of_others(group, by_rank));
  } else {
    operation = std::make_unique<Ring>(group, shape, std::move(name), std::move(blocks), false);  // a slab for each
  }
  for (const GatheredTensor& tensor : tensors) operation->copy_at_start(tensor.blocks[rank], tensor.input);
  return operation;
}

std::unique_ptr<Operation> make_reduce_scatter(const AlgorithmTable& table, const GroupView& group,
                                               const std::vector<ScatteredTensor>& tensors, DType dtype, ReduceOp op,
                                               std::string name) {
  check_reduction(dtype, op);
  std::vector<std::vector<std::span<std::byte>>> chunks;
  Scattered output;
  for (const ScatteredTensor& tensor : tensors) {
    check_pieces(group, tensor.chunks, tensor.output.size(), "reduce_scatter: input");
    check_elements(tensors.size(), tensor.output.size(), dtype, "reduce_scatter");
    chunks.push_back(tensor.chunks);
    output.add(tensor.output);
  }
  Algorithm algorithm = choose_reduce_scatter(table, group.hosts, output.size());
  OperationShape shape = shape_of(Collective::kReduceScatter, dtype, op, algorithm, output.size());
  shape.layout_hash = host_digest(group);
  if (tensors.size() > 1)
    for (const ScatteredTensor& tensor : tensors) shape.layout_hash = hash_mix(shape.layout_hash, tensor.output.size());
  if (group.size == 1) {
    auto alone = empty_exchange(group, shape, std::move(name));
    for (const ScatteredTensor& tensor : tensors) alone->copy_at_start(tensor.output, tensor.chunks[0]);
    return alone;
  }
  if (algorithm == Algorithm::kTwoLevel) {
    if (tensors.size() != 1) throw Error(ErrorKind::kValue, "reduce_scatter: in two levels one tensor goes at a time");
    return std::make_unique<TwoLevel>(group, shape, std::move(name), std::move(chunks[0]), tensors[0].output);
  }
  return std::make_unique<Pairwise>(group, shape, std::move(name), by_part(chunks, group.hosts.size()),
                                    std::move(output));
}

std::unique_ptr<Operation> make_gather(const GroupView& group, std::span<const std::byte> input,
                                       std::vector<std::span<std::byte>> blocks, DType dtype, int root,
                                       std::string name, const AlgorithmTable& table) {
  check_member(group, root, "gather: root");
  OperationShape shape =
      shape_of(Collective::kGather, dtype, ReduceOp::kSum, Algorithm::kDirectTransfer, input.size(), root);
  if (group.rank != root) {
    std::vector<DirectTransfer::Piece> out{{root, writable(input)}};
    auto operation = std::make_unique<DirectTransfer>(group, shape, std::move(name), std::move(out),
                                                      std::vector<DirectTransfer::Piece>{});
    announce_in_large_group(*operation, group, table);
    return operation;
  }
  check_pieces(group, blocks, input.size(), "gather: output");
  std::span<std::byte> own = blocks[static_cast<std::size_t>(root)];
  auto operation = std::make_unique<DirectTransfer>(group, shape, std::move(name), std::vector<DirectTransfer::Piece>{},
                                                    pieces_of_others(group, {blocks.begin(), blocks.end()}));
  operation->copy_at_start(own, input);
  announce_in_large_group(*operation, group, table);
  if (goes_direct(table, group.size)) announce_to_others(*operation, group);
  return operation;
}

std::unique_ptr<Operation> make_scatter(const GroupView& group, std::vector<std::span<std::byte>> chunks,
                                        std::span<std::byte> output, DType dtype, int root, std::string name,
                                        const AlgorithmTable& table) {
  check_member(group, root, "scatter: root");
  OperationShape shape =
      shape_of(Collective::kScatter, dtype, ReduceOp::kSum, Algorithm::kDirectTransfer, output.size(), root);
  if (group.rank != root) {
    std::vector<DirectTransfer::Piece> in{{root, output}};
    auto operation = std::make_unique<DirectTransfer>(group, shape, std::move(name),
                                                      std::vector<DirectTransfer::Piece>{}, std::move(in));
    operation->announces_to(root);
    announce_in_large_group(*operation, group, table);
    return operation;
  }
  check_pieces(group, chunks, output.size(), "scatter: input");
  auto operation = std::make_unique<DirectTransfer>(group, shape, std::move(name),
                                                    pieces_of_others(group, {chunks.begin(), chunks.end()}),
                                                    std::vector<DirectTransfer::Piece>{});
  operation->copy_at_start(output, chunks[static_cast<std::size_t>(root)]);
  return operation;
}

std::unique_ptr<Operation> make_all_to_all(const GroupView& group, std::vector<std::span<std::byte>> chunks,
                                           std::vector<std::span<std::byte>> blocks, DType dtype, std::string name) {
  check_pieces(group, chunks, std::nullopt, "all_to_all: input");
  check_pieces(group, blocks, std::nullopt, "all_to_all: output");
  auto rank = static_cast<std::size_t>(group.rank);
  if (chunks[rank].size() != blocks[rank].size())
    throw Error(ErrorKind::kValue, "all_to_all: rank " + std::to_string(group.rank) + " sends itself " +
                                       std::to_string(chunks[rank].size()) + " bytes and expects " +
                                       std::to_string(blocks[rank].size()));
  std::size_t sent = 0;
  for (auto chunk : chunks) sent += chunk.size();
  OperationShape shape = shape_of(Collective::kAllToAll, dtype, ReduceOp::kSum, Algorithm::kDirectTransfer, sent);
  auto operation = std::make_unique<DirectTransfer>(group, shape, std::move(name),
                                                    pieces_of_others(group, {chunks.begin(), chunks.end()}),
                                                    pieces_of_others(group, {blocks.begin(), blocks.end()}));
  FlowIdentity& identity = operation->mutable_identity();
  OperationShape common = identity.shape;
  common.count = 0;
  identity.fingerprint = common.fingerprint();
  identity.counts_differ = true;
  operation->copy_at_start(blocks[rank], chunks[rank]);
  return operation;
}

std::unique_ptr<Operation> make_send(const GroupView& group, std::span<std::byte> memory, DType dtype, int to,
                                     int32_t tag, std::string name) {
  check_member(group, to, "send: destination");
  if (to == group.rank) throw Error(ErrorKind::kValue, "send: a rank cannot send to itself");
  OperationShape shape =
      shape_of(Collective::kSend, dtype, ReduceOp::kSum, Algorithm::kDirectTransfer, memory.size(), tag);
  return std::make_unique<Send>(group, shape, std::move(name), memory, to);
}

std::unique_ptr<Operation> make_receive(const GroupView& group, std::span<std::byte> memory, DType dtype, int from,
                                        int32_t tag, std::string name) {
  if (from != PointToPoint::kAny) check_member(group, from, "recv: source");
  if (from == group.rank) throw Error(ErrorKind::kValue, "recv: a rank cannot receive from itself");
  // The receive has the sender's shape: the two must be equal.
  OperationShape shape =
      shape_of(Collective::kSend, dtype, ReduceOp::kSum, Algorithm::kDirectTransfer, memory.size(), tag);
  return std::make_unique<Receive>(group, shape, std::move(name), memory, from);
}

}  // namespace ringdp
