// The collectives in which ranks hold pieces: all-gather, reduce-scatter, gather, scatter, all-to-all.
#include <algorithm>

#include "torch/backend/call.h"
#include "torch/backend/process_group.h"

namespace ringdp {
namespace {

// Several of one type are one operation, independent of their devices: all ranks must decide alike.
bool of_one_type(const std::vector<at::Tensor>& tensors) {
  return !tensors.empty() && std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& it) {
    return it.scalar_type() == tensors[0].scalar_type();
  });
}

// Whether a result of the same operation overlaps `input`, the one at `index`, while it is still read.
bool overlaps_another(const at::Tensor& input, std::size_t index, const std::vector<at::Tensor>& outputs) {
  if (input.numel() == 0) return false;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (i != index && outputs[i].numel() > 0 && memory_overlaps(input, outputs[i])) return true;
  return false;
}

}  // namespace

// With k inputs per rank each output list has k·world tensors: rank 0's inputs, rank 1's, …
c10::intrusive_ptr<c10d::Work> ProcessGroupRing::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                           std::vector<at::Tensor>& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  if (inputs.empty()) refuse("allgather", "requires non-empty input tensor list");
  if (outputs.size() != inputs.size())
    refuse("allgather", "requires input/output tensor lists to have the same length");
  std::size_t each = inputs.size(), all = each * static_cast<std::size_t>(size());
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i].size() != all)
      refuse("allgather", "invalid output tensor list at index " + std::to_string(i) + " (expected length " +
                              std::to_string(all) + ", got " + std::to_string(outputs[i].size()) + ")");
  DType dtype = dtype_of(inputs[0], "all_gather");
  require_all_like("allgather", inputs, inputs[0]);
  for (const auto& list : outputs) require_all_like("allgather", list, inputs[0]);
  auto buffers = std::make_shared<Buffers>(*devices_, "all_gather");
  auto input = buffers->input(inputs);
  std::vector<std::span<std::byte>> blocks;
  for (std::size_t at = 0; at < all; at += each)
    blocks.push_back(buffers->output(at::TensorList(outputs[0]).slice(at, each)));
  for (std::size_t list = 1; list < outputs.size(); ++list)
    for (std::size_t i = 0; i < all; ++i) buffers->repeat(outputs[0][i], {outputs[list][i]});
  Call call = begin_call(c10d::OpType::ALLGATHER, "ring:all_gather", opts, inputs, outputs[0]);
  if (outputs.size() > 1) call.set_output_lists(outputs);
  return call.done(call->all_gather(input, std::move(blocks), dtype, call.options(std::move(buffers))));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::AllgatherOptions& opts) {
  std::vector<at::Tensor> outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                                 std::vector<at::Tensor>& inputs,
                                                                                 const c10d::AllgatherOptions& opts) {
  if (outputs.size() != inputs.size()) refuse("all_gather_into_tensor", "as many outputs as inputs are needed");
  for (std::size_t i = 0; i < inputs.size(); ++i)
    require_parts("all_gather_into_tensor", outputs[i], inputs[i], size(), "output", "input");
  Call call = begin_call(c10d::OpType::_ALLGATHER_BASE, "ring:_all_gather_base", opts, inputs, outputs);
  const std::size_t each = of_one_type(inputs) ? inputs.size() : 1;  // tensors of one operation
  for (std::size_t begin = 0; begin < inputs.size(); begin += each) {
    auto buffers = std::make_shared<Buffers>(*devices_, "all_gather_into_tensor");
    std::vector<GatheredTensor> tensors;
    for (std::size_t i = begin; i < begin + each; ++i) {
      const bool apart = each > 1 && overlaps_another(inputs[i], i, outputs);
      auto input = apart ? buffers->copied_input(inputs[i]) : buffers->input(inputs[i]);
      tensors.push_back({input, cut(buffers->output(outputs[i]), size())});
    }
    call.add(call->all_gather(tensors, dtype_of(inputs[begin], "all_gather_into_tensor"),
                              call.options(std::move(buffers), begin + each == inputs.size())));
  }
  return call.done();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::reduce_scatter(std::vector<at::Tensor>& outputs,
                                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                                const c10d::ReduceScatterOptions& opts) {
  require_one("reduce_scatter", outputs);
  if (inputs.size() != 1) refuse("reduce_scatter", "requires input/output tensor lists to have the same length");
  if (inputs[0].size() != static_cast<std::size_t>(size()))
    refuse("reduce_scatter", "invalid input tensor list at index 0 (expected length " + std::to_string(size()) +
                                 ", got " + std::to_string(inputs[0].size()) + ")");
  for (std::size_t i = 0; i < inputs[0].size(); ++i) require_like("reduce_scatter", inputs[0][i], outputs[0], i);
  ReduceOp op = reduce_op_of(opts.reduceOp, "reduce_scatter");
  require_reduction("reduce_scatter", dtype_of(outputs[0], "reduce_scatter"), op);
  Call call = begin_call(c10d::OpType::REDUCE_SCATTER, "ring:reduce_scatter", opts, inputs[0], outputs);
  auto buffers = std::make_shared<Buffers>(*devices_, "reduce_scatter", opts.reduceOp, outputs[0]);
  std::vector<std::span<std::byte>> chunks;
  for (const at::Tensor& input : inputs[0]) chunks.push_back(buffers->input(input));
  auto output = buffers->output(outputs[0]);
  return call.done(call->reduce_scatter(std::move(chunks), output, dtype_of(outputs[0], "reduce_scatter"), op,
                                        call.options(std::move(buffers), true)));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                      const c10d::ReduceScatterOptions& opts) {
  std::vector<at::Tensor> outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != inputs.size()) refuse("reduce_scatter_tensor", "as many outputs as inputs are needed");
  ReduceOp op = reduce_op_of(opts.reduceOp, "reduce_scatter_tensor");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_parts("reduce_scatter_tensor", inputs[i], outputs[i], size(), "input", "output");
    require_reduction("reduce_scatter_tensor", dtype_of(outputs[i], "reduce_scatter_tensor"), op);
  }
  Call call = begin_call(c10d::OpType::_REDUCE_SCATTER_BASE, "ring:_reduce_scatter_base", opts, inputs, outputs);
  std::size_t bytes = 0;
  for (const at::Tensor& output : outputs) bytes += output.nbytes();
  const bool together = of_one_type(outputs) && call->scatters_together(bytes);
  const std::size_t each = together ? inputs.size() : 1;  // tensors of one operation
  for (std::size_t begin = 0; begin < inputs.size(); begin += each) {
    auto buffers = std::make_shared<Buffers>(*devices_, "reduce_scatter_tensor", opts.reduceOp, outputs[begin]);
    std::vector<ScatteredTensor> tensors;
    for (std::size_t i = begin; i < begin + each; ++i) {
      const bool apart = each > 1 && overlaps_another(inputs[i], i, outputs);
      auto input = apart ? buffers->copied_input(inputs[i]) : buffers->input(inputs[i]);
      tensors.push_back({cut(input, size()), buffers->output(outputs[i])});
    }
    call.add(call->reduce_scatter(tensors, dtype_of(outputs[begin], "reduce_scatter_tensor"), op,
                                  call.options(std::move(buffers), begin + each == inputs.size())));
  }
  return call.done();
}

// `outputs[r][i]` receives rank r's `inputs[i]`: deprecated in torch, one operation per tensor here.
c10::intrusive_ptr<c10d::Work> ProcessGroupRing::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                                     std::vector<at::Tensor>& inputs,
                                                                     const c10d::AllgatherOptions& opts) {
  if (inputs.empty()) refuse("allgather_coalesced", "requires non-empty input tensor list");
  if (outputs.size() != static_cast<std::size_t>(size()))
    refuse("allgather_coalesced", "output lists should be equal to world size");
  std::vector<at::Tensor> flat;
  for (const auto& list : outputs) {
    if (list.size() != inputs.size())
      refuse("allgather_coalesced", "invalid output size: (expected length " + std::to_string(inputs.size()) +
                                        ", got " + std::to_string(list.size()) + ")");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (list[i].sizes() != inputs[i].sizes())
        refuse("allgather_coalesced", "invalid size of output tensor at index " + std::to_string(i) +
                                          " (expected length " + c10::str(inputs[i].sizes()) + ", got " +
                                          c10::str(list[i].sizes()) + ")");
      require_like("allgather_coalesced", list[i], inputs[i], i);
      flat.push_back(list[i]);
    }
  }
  for (const at::Tensor& input : inputs) (void)dtype_of(input, "allgather_coalesced");
  Call call = begin_call(c10d::OpType::ALLGATHER_COALESCED, "ring:all_gather", opts, inputs, flat);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto buffers = std::make_shared<Buffers>(*devices_, "all_gather");
    auto input = buffers->input(inputs[i]);
    std::vector<std::span<std::byte>> blocks;
    for (const auto& list : outputs) blocks.push_back(buffers->output(list[i]));
    call.add(call->all_gather(input, std::move(blocks), dtype_of(inputs[i], "all_gather"),
                              call.options(std::move(buffers), i + 1 == inputs.size())));
  }
  return call.done();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                                        std::vector<at::Tensor>& inputs,
                                                        const c10d::GatherOptions& opts) {
  require_root("gather", opts.rootRank, size());
  require_one("gather", inputs, "input ");
  bool root = opts.rootRank == rank();
  DType dtype = dtype_of(inputs[0], "gather");
  require_root_list("gather", outputs, root, size(), "output");
  std::vector<at::Tensor> results = root ? outputs[0] : std::vector<at::Tensor>{};
  require_all_like("gather", results, inputs[0]);
  auto buffers = std::make_shared<Buffers>(*devices_, "gather");
  auto input = buffers->input(inputs[0]);
  std::vector<std::span<std::byte>> blocks;
  for (const at::Tensor& result : results) blocks.push_back(buffers->output(result));
  Call call = begin_call(c10d::OpType::GATHER, "ring:gather", opts, inputs, results);
  return call.done(
      call->gather(input, std::move(blocks), dtype, static_cast<int>(opts.rootRank), call.options(std::move(buffers))));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::gather_single(at::Tensor& output, at::Tensor& input,
                                                               const c10d::GatherOptions& opts) {
  require_root("gather_single", opts.rootRank, size());
  const bool root = opts.rootRank == rank();
  if (root) require_parts("gather_single", output, input, size(), "output", "input");
  std::vector<at::Tensor> inputs{input}, results;
  if (root) results.push_back(output);
  const DType dtype = dtype_of(input, "gather_single");
  auto buffers = std::make_shared<Buffers>(*devices_, "gather_single");
  auto memory = buffers->input(input);
  std::vector<std::span<std::byte>> blocks;
  if (root) blocks = cut(buffers->output(output), size());
  Call call = begin_call(c10d::OpType::GATHER, "ring:gather", opts, inputs, results);
  return call.done(call->gather(memory, std::move(blocks), dtype, static_cast<int>(opts.rootRank),
                                call.options(std::move(buffers))));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::scatter(std::vector<at::Tensor>& outputs,
                                                         std::vector<std::vector<at::Tensor>>& inputs,
                                                         const c10d::ScatterOptions& opts) {
  require_root("scatter", opts.rootRank, size());
  require_one("scatter", outputs, "output ");
  bool root = opts.rootRank == rank();
  DType dtype = dtype_of(outputs[0], "scatter");
  require_root_list("scatter", inputs, root, size(), "input");
  std::vector<at::Tensor> pieces = root ? inputs[0] : std::vector<at::Tensor>{};
  require_all_like("scatter", pieces, outputs[0]);
  auto buffers = std::make_shared<Buffers>(*devices_, "scatter");
  auto output = buffers->output(outputs[0]);
  std::vector<std::span<std::byte>> chunks;
  for (const at::Tensor& piece : pieces) chunks.push_back(buffers->input(piece));
  Call call = begin_call(c10d::OpType::SCATTER, "ring:scatter", opts, pieces, outputs);
  return call.done(call->scatter(std::move(chunks), output, dtype, static_cast<int>(opts.rootRank),
                                 call.options(std::move(buffers))));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::alltoall(std::vector<at::Tensor>& outputs,
                                                          std::vector<at::Tensor>& inputs,
                                                          const c10d::AllToAllOptions& opts) {
  auto world = static_cast<std::size_t>(size());
  for (const auto& [list, kind] : {std::pair{&inputs, "input"}, std::pair{&outputs, "output"}})
    if (list->size() != world)
      refuse("alltoall", std::string(kind) + " tensor list size " + std::to_string(list->size()) +
                             " does not match world size " + std::to_string(world));
  DType dtype = dtype_of(inputs[0], "all_to_all");
  auto buffers = std::make_shared<Buffers>(*devices_, "all_to_all");
  std::vector<std::span<std::byte>> chunks, blocks;
  for (std::size_t i = 0; i < world; ++i) {
    for (const at::Tensor* tensor : {&inputs[i], &outputs[i]})
      if (dtype_of(*tensor, "all_to_all") != dtype)
        refuse("alltoall", "invalid tensor type at index " + std::to_string(i) + " (expected " + inputs[0].toString() +
                               ", got " + tensor->toString() + ")");
    chunks.push_back(buffers->input(inputs[i]));
    blocks.push_back(buffers->output(outputs[i]));
  }
  Call call = begin_call(c10d::OpType::ALLTOALL, "ring:all_to_all", opts, inputs, outputs);
  return call.done(call->all_to_all(std::move(chunks), std::move(blocks), dtype, call.options(std::move(buffers))));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                               std::vector<int64_t>& output_rows,
                                                               std::vector<int64_t>& input_rows,
                                                               const c10d::AllToAllOptions& opts) {
  DType dtype = dtype_of(input, "all_to_all");
  if (dtype_of(output, "all_to_all") != dtype)
    refuse("alltoall_base", "output tensor must have the same type as input tensor");
  auto buffers = std::make_shared<Buffers>(*devices_, "all_to_all");
  auto chunks = cut_rows("alltoall_base", input, buffers->input(input), input_rows, size());
  auto blocks = cut_rows("alltoall_base", output, buffers->output(output), output_rows, size());
  Call call = begin_call(c10d::OpType::ALLTOALL_BASE, "ring:all_to_all", opts, {input}, {output});
  return call.done(call->all_to_all(std::move(chunks), std::move(blocks), dtype, call.options(std::move(buffers))));
}

}  // namespace ringdp
