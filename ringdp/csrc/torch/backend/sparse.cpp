#include "torch/backend/sparse.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>

#include "base/error.h"
#include "torch/backend/buffers.h"
#include "torch/backend/call.h"
#include "torch/backend/work.h"

namespace ringdp {
namespace {

constexpr int64_t kMaxDims = 16;
constexpr int64_t kHeaderNumbers = 3 + kMaxDims;  // elements, sparse dimensions, dense dimensions, sizes

// Shared by the stages; owned by their callbacks.
struct SparseAllReduce {
  std::shared_ptr<GroupHandle> group;   // shared with the process group, which may be destroyed in between
  std::shared_ptr<DeviceSide> devices;  // likewise
  int64_t timeout_ms;
  std::vector<at::Tensor> tensors;                 // the caller's
  at::Tensor mine;                                 // coalesced
  at::Tensor headers;                              // [world, kHeaderNumbers]
  std::vector<at::Tensor> indices, values;         // per rank
  std::vector<std::shared_ptr<Staging>> stagings;  // of the operations so far
  std::optional<c10::Stream> stream;               // the caller's, if its tensors are on a device: the stages use it
  c10::intrusive_ptr<StagedWork> work;
};
using SparseAllReducePtr = std::shared_ptr<SparseAllReduce>;

at::Tensor header_of(const at::Tensor& tensor) {
  at::Tensor header = at::zeros({kHeaderNumbers}, at::kLong);
  auto* at = header.data_ptr<int64_t>();
  at[0] = tensor._nnz();
  at[1] = tensor.sparse_dim();
  at[2] = tensor.dense_dim();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) at[3 + dim] = tensor.size(dim);
  return header;
}

std::vector<int64_t> sizes_in(const at::Tensor& header) {
  const auto* at = header.data_ptr<int64_t>();
  return {at + 3, at + 3 + std::min(kMaxDims, at[1] + at[2])};
}

// The options of one of the operations. After it `next` runs, if given; without it, or after an error, the work ends.
CallOptions options_of(const SparseAllReducePtr& it, std::shared_ptr<Buffers> buffers,
                       void (*next)(const SparseAllReducePtr&)) {
  CallOptions options;
  options.timeout_ms = it->timeout_ms;
  if ((options.staging = buffers->staging())) it->stagings.push_back(options.staging);
  options.keep_alive = std::move(buffers);
  if (next != nullptr)
    options.on_done = [it, next](std::exception_ptr error) {
      if (error) return it->work->end(std::move(error));
      it->work->attempt([&] {
        const c10::OptionalStreamGuard guard(it->stream);
        for (const auto& staging : it->stagings) staging->queue().order_caller();
        next(it);
      });
    };
  return options;
}

void sum_up(const SparseAllReducePtr& it) {
  const c10::InferenceMode as_tensors(it->tensors[0].is_inference());
  const at::NoGradGuard no_grad;
  at::Tensor sum;
  for (std::size_t rank = 0; rank < it->indices.size(); ++rank) {
    at::Tensor part =
        at::sparse_coo_tensor(it->indices[rank], it->values[rank], it->mine.sizes(), it->mine.options(), true);
    sum = sum.defined() ? sum + part : part;
  }
  sum = sum.coalesce();
  for (at::Tensor& tensor : it->tensors) tensor.copy_(sum);
  it->work->end(nullptr);
}

void gather(const SparseAllReducePtr& it, const std::vector<at::Tensor>& blocks,
            void (*next)(const SparseAllReducePtr&)) {
  auto buffers = std::make_shared<Buffers>(*it->devices, "all_reduce of a sparse tensor");
  auto rank = static_cast<std::size_t>(it->group->view().rank);
  auto own = buffers->input(blocks[rank]);
  std::vector<std::span<std::byte>> to(blocks.size(), own), from;
  for (const at::Tensor& block : blocks) from.push_back(buffers->output(block));
  it->group->all_to_all(std::move(to), std::move(from), dtype_of(blocks[0], "all_reduce"),
                        options_of(it, std::move(buffers), next));
}

void exchange_elements(const SparseAllReducePtr& it) {
  const c10::InferenceMode as_tensors(it->tensors[0].is_inference());
  const at::NoGradGuard no_grad;
  std::vector<int64_t> sizes = it->mine.sizes().vec();
  at::Tensor values = it->mine.values();
  for (int64_t rank = 0; rank < it->group->view().size; ++rank) {
    at::Tensor header = it->headers[rank];
    const auto* numbers = header.data_ptr<int64_t>();
    bool same = numbers[1] == it->mine.sparse_dim() && numbers[2] == it->mine.dense_dim() && sizes_in(header) == sizes;
    if (!same || numbers[0] < 0)
      throw Error(ErrorKind::kMismatch,
                  "ranks disagree about a sparse all_reduce: rank " + std::to_string(it->group->view().rank) + " has " +
                      c10::str(it->mine.sizes()) + " with " + std::to_string(it->mine.sparse_dim()) +
                      " sparse dimensions, rank " + std::to_string(rank) + " has " +
                      c10::str(at::IntArrayRef(sizes_in(header))) + " with " + std::to_string(numbers[1]) +
                      "; pass tensors of the same shape on every rank");
    bool own = rank == it->group->view().rank;
    std::vector<int64_t> shape = values.sizes().vec();
    shape[0] = numbers[0];
    it->indices.push_back(own ? it->mine.indices().contiguous()
                              : at::empty({numbers[1], numbers[0]}, it->mine.indices().options()));
    it->values.push_back(own ? values.contiguous() : at::empty(shape, values.options()));
  }
  gather(it, it->indices, nullptr);
  gather(it, it->values, sum_up);
}

}  // namespace

c10::intrusive_ptr<c10d::Work> all_reduce_sparse(std::shared_ptr<GroupHandle> group,
                                                 std::shared_ptr<DeviceSide> devices, std::shared_ptr<Hooks> hooks,
                                                 const std::vector<at::Tensor>& tensors,
                                                 std::chrono::milliseconds timeout, bool async_op) {
  at::NoGradGuard no_grad;
  at::Tensor mine = tensors[0].detach();
  for (std::size_t i = 1; i < tensors.size(); ++i) mine = mine + tensors[i].detach();
  if (mine.dim() > kMaxDims)
    refuse("allreduce", "sparse tensors of more than " + std::to_string(kMaxDims) + " dimensions");
  auto it = std::make_shared<SparseAllReduce>(SparseAllReduce{.group = group,
                                                              .devices = std::move(devices),
                                                              .timeout_ms = timeout > kNoTimeout ? timeout.count() : 0,
                                                              .tensors = tensors,
                                                              .mine = mine.coalesce(),
                                                              .headers = {},
                                                              .indices = {},
                                                              .values = {},
                                                              .stagings = {},
                                                              .stream = {},
                                                              .work = {}});
  DType dtype = dtype_of(it->mine.values(), "all_reduce");
  require_reduction("allreduce", dtype, ReduceOp::kSum);
  it->work = c10::make_intrusive<StagedWork>(group->engine(), group->view().rank, c10d::OpType::_ALLREDUCE_SPARSE,
                                             "ring:all_reduce", tensors, std::move(hooks));
  it->headers = at::empty({group->view().size, kHeaderNumbers}, at::kLong);
  if (!mine.is_cpu()) it->stream = c10::impl::VirtualGuardImpl(mine.device().type()).getStream(mine.device());
  auto buffers = std::make_shared<Buffers>(*it->devices, "all_reduce of a sparse tensor");
  auto header = buffers->input(header_of(it->mine));
  auto blocks = cut(buffers->output(it->headers), group->view().size);
  group->all_gather(header, std::move(blocks), DType::kInt64, options_of(it, std::move(buffers), exchange_elements));
  c10::intrusive_ptr<StagedWork> work = it->work;
  if (!async_op) work->wait(kNoTimeout);
  return work;
}

}  // namespace ringdp
