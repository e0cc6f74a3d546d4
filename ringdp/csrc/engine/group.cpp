#include "engine/group.h"

#include <utility>

#include "base/naming.h"

namespace ringdp {

GroupHandle::GroupHandle(std::shared_ptr<Runtime> runtime, const std::string& name, const std::vector<int>& members,
                         int64_t timeout_ms, const AlgorithmTables& tables,
                         const std::shared_ptr<ElasticGroup>& elastic)
    : OpenGroup(std::move(runtime), name, members, timeout_ms, elastic), table_(tables.of(layout_of(view().hosts))) {}

GroupView GroupHandle::all_reduce_view() const {
  GroupView out = view();
  out.rank_order = rank_order_;
  return out;
}

std::shared_ptr<Work> GroupHandle::barrier(CallOptions options) {
  return submit(make_barrier(view(), current_name(), table_), std::move(options));
}

std::shared_ptr<Work> GroupHandle::announce(const Announcement& what, CallOptions options) {
  return submit(make_announcement(view(), what, current_name(), table_), std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_reduce(std::span<std::byte> memory, DType dtype, ReduceOp op,
                                              CallOptions options) {
  if (!options.input.empty() && !options.factors.empty())
    throw Error(ErrorKind::kValue, "all_reduce: an input that is left as it is cannot be multiplied");
  const GroupView group = all_reduce_view();
  InputFactors factors(dtype, std::move(options.factors), group.rank, group.size);
  auto operation = make_all_reduce(table_, group, memory, dtype, op, current_name(), options.input);
  operation->watch(options.finite);
  operation->multiply(memory, std::move(factors));
  return submit(std::move(operation), std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_reduce_compressed(std::vector<CompressedSection> sections,
                                                         const Compression& compression, CallOptions options) {
  auto report = std::move(options.finite);
  auto operation = make_all_reduce_compressed(all_reduce_view(), std::move(sections), compression, std::move(report),
                                              current_name());
  return submit(std::move(operation), std::move(options));
}

std::shared_ptr<Work> GroupHandle::broadcast(std::span<std::byte> memory, DType dtype, int root, CallOptions options) {
  return submit(make_broadcast(table_, view(), memory, dtype, root, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_gather(const std::vector<GatheredTensor>& tensors, DType dtype,
                                              CallOptions options) {
  return submit(make_all_gather(table_, view(), tensors, dtype, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_gather(std::span<const std::byte> input,
                                              std::vector<std::span<std::byte>> blocks, DType dtype,
                                              CallOptions options) {
  return all_gather({{input, std::move(blocks)}}, dtype, std::move(options));
}

std::shared_ptr<Work> GroupHandle::reduce_scatter(const std::vector<ScatteredTensor>& tensors, DType dtype, ReduceOp op,
                                                  CallOptions options) {
  return submit(make_reduce_scatter(table_, view(), tensors, dtype, op, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::reduce_scatter(std::vector<std::span<std::byte>> chunks, std::span<std::byte> output,
                                                  DType dtype, ReduceOp op, CallOptions options) {
  return reduce_scatter({{std::move(chunks), output}}, dtype, op, std::move(options));
}

std::shared_ptr<Work> GroupHandle::reduce(std::span<std::byte> memory, DType dtype, ReduceOp op, int root,
                                          CallOptions options) {
  return submit(make_reduce(table_, view(), memory, dtype, op, root, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::gather(std::span<const std::byte> input, std::vector<std::span<std::byte>> blocks,
                                          DType dtype, int root, CallOptions options) {
  return submit(make_gather(view(), input, std::move(blocks), dtype, root, current_name(), table_), std::move(options));
}

std::shared_ptr<Work> GroupHandle::scatter(std::vector<std::span<std::byte>> chunks, std::span<std::byte> output,
                                           DType dtype, int root, CallOptions options) {
  return submit(make_scatter(view(), std::move(chunks), output, dtype, root, current_name(), table_),
                std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_to_all(std::vector<std::span<std::byte>> chunks,
                                              std::vector<std::span<std::byte>> blocks, DType dtype,
                                              CallOptions options) {
  return submit(make_all_to_all(view(), std::move(chunks), std::move(blocks), dtype, current_name()),
                std::move(options));
}

std::shared_ptr<Work> GroupHandle::send(std::span<std::byte> memory, DType dtype, int to, int32_t tag,
                                        CallOptions options) {
  return submit(make_send(view(), memory, dtype, to, tag, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::receive(std::span<std::byte> memory, DType dtype, int from, int32_t tag,
                                           CallOptions options) {
  return submit(make_receive(view(), memory, dtype, from, tag, current_name()), std::move(options));
}

}  // namespace ringdp
