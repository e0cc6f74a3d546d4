#include "torch/process_group.h"

#include "base/error.h"
#include "kernels/kernels.h"

namespace ringdp {
namespace {

[[noreturn]] void refuse(const char* what, const std::string& why) {
  throw Error(ErrorKind::kValue, std::string("ProcessGroupRing::") + what + ": " + why);
}

void require_one(const char* what, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) refuse(what, "requires non-empty tensor list");
  if (tensors.size() != 1) refuse(what, "requires a single-element tensor list, got " + std::to_string(tensors.size()));
}

void require_like(const char* what, const at::Tensor& tensor, const at::Tensor& model, std::size_t index) {
  if (tensor.scalar_type() != model.scalar_type())
    refuse(what, "invalid tensor type at index " + std::to_string(index) + " (expected " + model.toString() + ", got " +
                     tensor.toString() + ")");
  if (tensor.numel() != model.numel())
    refuse(what, "invalid tensor size at index " + std::to_string(index) + " (expected " + c10::str(model.sizes()) +
                     ", got " + c10::str(tensor.sizes()) + ")");
}

// `whole` holds `parts` pieces of the size of `piece`.
void require_parts(const char* what, const at::Tensor& whole, const at::Tensor& piece, int parts,
                   const char* whole_name, const char* piece_name) {
  if (whole.scalar_type() != piece.scalar_type())
    refuse(what, std::string(whole_name) + " tensor must have the same type as " + piece_name + " tensor");
  if (whole.numel() != piece.numel() * parts)
    refuse(what,
           std::string(whole_name) + " tensor size must be equal to world_size times " + piece_name + " tensor size");
}

std::vector<std::span<std::byte>> cut(std::span<std::byte> whole, int parts) {
  std::vector<std::span<std::byte>> out;
  std::size_t each = whole.size() / static_cast<std::size_t>(parts);
  for (int part = 0; part < parts; ++part) out.push_back(whole.subspan(static_cast<std::size_t>(part) * each, each));
  return out;
}

}  // namespace

// Collects the operations of one call; `done` makes the Work and waits where the caller asked for that.
struct ProcessGroupRing::Call {
  ProcessGroupRing& group;
  bool synchronous;
  int64_t timeout_ms;
  c10::intrusive_ptr<RingWork> work;
  std::vector<std::shared_ptr<Work>> operations = {};

  Call(ProcessGroupRing& owner, c10d::OpType type, const char* title, bool async_op, std::chrono::milliseconds timeout,
       const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs)
      : group(owner),
        synchronous(!async_op),
        timeout_ms(timeout > kNoTimeout ? timeout.count() : 0),
        work(c10::make_intrusive<RingWork>(owner.getRank(), type, title, inputs, std::move(outputs))) {
    ++owner.calls_;
  }

  // Options for the next operation; with `last` its end is the end of the call.
  CallOptions options(std::shared_ptr<Buffers> buffers, bool last) {
    CallOptions out;
    out.timeout_ms = timeout_ms;
    out.caller_waits = synchronous;
    if (buffers->copies()) {
      out.before = [buffers] { buffers->before(); };
      out.after = [buffers] { buffers->after(); };
    }
    out.keep_alive = std::move(buffers);
    if (last && !synchronous) out.on_done = [work = work](std::exception_ptr error) { work->mark(std::move(error)); };
    return out;
  }

  c10::intrusive_ptr<c10d::Work> done() {
    bool nothing = operations.empty();
    work->set_operations(group.group_->engine(), std::move(operations));
    if (nothing) {
      work->mark(nullptr);
    } else if (synchronous) {
      work->wait(kNoTimeout);
      work->mark(nullptr);
    }
    return work;
  }
};

ProcessGroupRing::ProcessGroupRing(std::unique_ptr<GroupHandle> group, std::shared_ptr<Runtime> runtime,
                                   bool owns_runtime)
    : c10d::Backend(group->view().rank, group->view().size),
      group_(std::move(group)),
      runtime_(std::move(runtime)),
      owns_runtime_(owns_runtime) {
  init();
}

ProcessGroupRing::~ProcessGroupRing() { shutdown(); }

void ProcessGroupRing::shutdown() {
  group_->close();
  if (owns_runtime_) runtime_->shut_down();
}

void ProcessGroupRing::abort() {
  runtime_->engine().abort("the process group was aborted on rank " + std::to_string(getRank()));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::allreduce(std::vector<at::Tensor>& tensors,
                                                           const c10d::AllreduceOptions& opts) {
  require_one("allreduce", tensors);
  c10d::AllreduceCoalescedOptions same;
  static_cast<c10d::AllreduceOptions&>(same) = opts;
  return allreduce_coalesced(tensors, same);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                                     const c10d::AllreduceCoalescedOptions& opts) {
  ReduceOp op = reduce_op_of(opts.reduceOp, "all_reduce");
  for (const at::Tensor& tensor : tensors) (void)reduce_kernels(dtype_of(tensor, "all_reduce"), op);
  Call call(*this, c10d::OpType::ALLREDUCE, "ring:all_reduce", opts.asyncOp, opts.timeout, tensors, tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto buffers = std::make_shared<Buffers>("all_reduce");
    auto memory = buffers->in_place(tensors[i]);
    call.operations.push_back(group_->all_reduce(memory, dtype_of(tensors[i], "all_reduce"), op,
                                                 call.options(std::move(buffers), i + 1 == tensors.size())));
  }
  return call.done();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::broadcast(std::vector<at::Tensor>& tensors,
                                                           const c10d::BroadcastOptions& opts) {
  if (opts.rootRank < 0 || opts.rootRank >= getSize())
    refuse("broadcast", "invalid root rank: " + std::to_string(opts.rootRank));
  if (opts.rootTensor != 0) refuse("broadcast", "invalid root tensor: " + std::to_string(opts.rootTensor));
  require_one("broadcast", tensors);
  Call call(*this, c10d::OpType::BROADCAST, "ring:broadcast", opts.asyncOp, opts.timeout, tensors, tensors);
  auto buffers = std::make_shared<Buffers>("broadcast");
  bool root = opts.rootRank == getRank();
  auto memory = root ? buffers->input(tensors[0]) : buffers->output(tensors[0]);
  call.operations.push_back(group_->broadcast(memory, dtype_of(tensors[0], "broadcast"),
                                              static_cast<int>(opts.rootRank), call.options(std::move(buffers), true)));
  return call.done();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                           std::vector<at::Tensor>& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  require_one("allgather", inputs);
  if (outputs.size() != 1) refuse("allgather", "requires input/output tensor lists to have the same length");
  if (outputs[0].size() != static_cast<std::size_t>(getSize()))
    refuse("allgather", "invalid output tensor list at index 0 (expected length " + std::to_string(getSize()) +
                            ", got " + std::to_string(outputs[0].size()) + ")");
  for (std::size_t i = 0; i < outputs[0].size(); ++i) require_like("allgather", outputs[0][i], inputs[0], i);
  Call call(*this, c10d::OpType::ALLGATHER, "ring:all_gather", opts.asyncOp, opts.timeout, inputs, outputs[0]);
  auto buffers = std::make_shared<Buffers>("all_gather");
  auto input = buffers->input(inputs[0]);
  std::vector<std::span<std::byte>> blocks;
  for (const at::Tensor& output : outputs[0]) blocks.push_back(buffers->output(output));
  call.operations.push_back(group_->all_gather(input, std::move(blocks), dtype_of(inputs[0], "all_gather"),
                                               call.options(std::move(buffers), true)));
  return call.done();
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
    require_parts("all_gather_into_tensor", outputs[i], inputs[i], getSize(), "output", "input");
  Call call(*this, c10d::OpType::_ALLGATHER_BASE, "ring:_all_gather_base", opts.asyncOp, opts.timeout, inputs, outputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto buffers = std::make_shared<Buffers>("all_gather_into_tensor");
    auto input = buffers->input(inputs[i]);
    auto blocks = cut(buffers->output(outputs[i]), getSize());
    call.operations.push_back(group_->all_gather(input, std::move(blocks),
                                                 dtype_of(inputs[i], "all_gather_into_tensor"),
                                                 call.options(std::move(buffers), i + 1 == inputs.size())));
  }
  return call.done();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::reduce_scatter(std::vector<at::Tensor>& outputs,
                                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                                const c10d::ReduceScatterOptions& opts) {
  require_one("reduce_scatter", outputs);
  if (inputs.size() != 1) refuse("reduce_scatter", "requires input/output tensor lists to have the same length");
  if (inputs[0].size() != static_cast<std::size_t>(getSize()))
    refuse("reduce_scatter", "invalid input tensor list at index 0 (expected length " + std::to_string(getSize()) +
                                 ", got " + std::to_string(inputs[0].size()) + ")");
  for (std::size_t i = 0; i < inputs[0].size(); ++i) require_like("reduce_scatter", inputs[0][i], outputs[0], i);
  ReduceOp op = reduce_op_of(opts.reduceOp, "reduce_scatter");
  Call call(*this, c10d::OpType::REDUCE_SCATTER, "ring:reduce_scatter", opts.asyncOp, opts.timeout, inputs[0], outputs);
  auto buffers = std::make_shared<Buffers>("reduce_scatter");
  std::vector<std::span<std::byte>> chunks;
  for (const at::Tensor& input : inputs[0]) chunks.push_back(buffers->input(input));
  auto output = buffers->output(outputs[0]);
  call.operations.push_back(group_->reduce_scatter(std::move(chunks), output, dtype_of(outputs[0], "reduce_scatter"),
                                                   op, call.options(std::move(buffers), true)));
  return call.done();
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
  for (std::size_t i = 0; i < inputs.size(); ++i)
    require_parts("reduce_scatter_tensor", inputs[i], outputs[i], getSize(), "input", "output");
  Call call(*this, c10d::OpType::_REDUCE_SCATTER_BASE, "ring:_reduce_scatter_base", opts.asyncOp, opts.timeout, inputs,
            outputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto buffers = std::make_shared<Buffers>("reduce_scatter_tensor");
    auto chunks = cut(buffers->input(inputs[i]), getSize());
    auto output = buffers->output(outputs[i]);
    call.operations.push_back(group_->reduce_scatter(std::move(chunks), output,
                                                     dtype_of(outputs[i], "reduce_scatter_tensor"), op,
                                                     call.options(std::move(buffers), i + 1 == inputs.size())));
  }
  return call.done();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::barrier(const c10d::BarrierOptions& opts) {
  Call call(*this, c10d::OpType::BARRIER, "ring:barrier", opts.asyncOp, opts.timeout, {}, {});
  call.operations.push_back(group_->barrier(call.options(std::make_shared<Buffers>("barrier"), true)));
  return call.done();
}

}  // namespace ringdp
