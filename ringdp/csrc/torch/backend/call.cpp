#include "torch/backend/call.h"

#include <numeric>

#include "base/error.h"
#include "kernels/kernels.h"
#include "torch/backend/call_site.h"

namespace ringdp {

Call::Call(std::shared_ptr<GroupHandle> group, DeviceSide& devices, c10::intrusive_ptr<RingWork> work,
           const CallTiming& timing)
    : group_(std::move(group)),
      devices_(devices),
      synchronous_(!timing.async_op),
      timeout_ms_(timing.timeout > kNoTimeout ? timing.timeout.count() : 0),
      call_site_(python_call_site()),
      work_(std::move(work)) {}

CallOptions Call::options(std::shared_ptr<Buffers> buffers, bool last) {
  CallOptions out;
  out.timeout_ms = timeout_ms_;
  out.caller_waits = synchronous_;
  out.call_site = call_site_;
  if (buffers->copies()) {
    out.before = [buffers] { buffers->before(); };
    out.after = [buffers] { buffers->after(); };
  }
  if (const auto& staging = buffers->staging()) {
    out.staging = staging;
    work_->add_staging(staging);
    uses_.insert(uses_.end(), buffers->uses().begin(), buffers->uses().end());
  }
  out.keep_alive = std::move(buffers);
  if (last && !synchronous_) out.on_done = [work = work_](std::exception_ptr error) { work->mark(std::move(error)); };
  return out;
}

c10::intrusive_ptr<c10d::Work> Call::done() {
  const bool nothing = operations_.empty();
  if (const auto elastic = UnitScope::active() ? nullptr : group_->elastic(); elastic && !nothing) {
    elastic->called(operations_, !c10d::isP2POp(work_->retrieveOpType()));
    work_->belong_to(elastic);
  }
  work_->set_operations(group_->engine(), std::move(operations_));
  for (const DeviceUse& use : uses_) devices_.remember(work_, use);
  if (nothing) {
    work_->mark(nullptr);
  } else if (synchronous_) {
    work_->wait(kNoTimeout);
    work_->mark(nullptr);
  }
  return work_;
}

void refuse(const char* what, const std::string& why) {
  throw Error(ErrorKind::kValue, std::string("ProcessGroupRing::") + what + ": " + why);
}

void require_reduction(const char* what, DType dtype, ReduceOp op) {
  if (!reduction_supported(dtype, op))
    refuse(what,
           std::string(reduce_op_name(op)) + " is not defined for tensors of type " + std::string(dtype_name(dtype)));
}

void require_not_empty(const char* what, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) refuse(what, "requires non-empty tensor list");
}

void require_one(const char* what, const std::vector<at::Tensor>& tensors, const char* kind) {
  if (tensors.size() != 1)
    refuse(what,
           std::string("requires a single-element ") + kind + "tensor list, got " + std::to_string(tensors.size()));
}

void require_root(const char* what, int64_t root, int world) {
  if (root < 0 || root >= world)
    refuse(what, "invalid root rank: " + std::to_string(root) + " of " + std::to_string(world));
}

void require_like(const char* what, const at::Tensor& tensor, const at::Tensor& model, std::size_t index) {
  if (tensor.layout() != model.layout())
    refuse(what, "invalid tensor layout at index " + std::to_string(index) + " (expected " + c10::str(model.layout()) +
                     ", got " + c10::str(tensor.layout()) + ")");
  if (tensor.scalar_type() != model.scalar_type() || tensor.device().type() != model.device().type())
    refuse(what, "invalid tensor type at index " + std::to_string(index) + " (expected " + model.toString() + ", got " +
                     tensor.toString() + ")");
  if (tensor.numel() != model.numel())
    refuse(what, "invalid tensor size at index " + std::to_string(index) + " (expected " + c10::str(model.sizes()) +
                     ", got " + c10::str(tensor.sizes()) + ")");
}

void require_all_like(const char* what, const std::vector<at::Tensor>& tensors, const at::Tensor& model) {
  for (std::size_t i = 0; i < tensors.size(); ++i) require_like(what, tensors[i], model, i);
}

void require_parts(const char* what, const at::Tensor& whole, const at::Tensor& piece, int parts,
                   const char* whole_name, const char* piece_name) {
  if (whole.scalar_type() != piece.scalar_type())
    refuse(what, std::string(whole_name) + " tensor must have the same type as " + piece_name + " tensor");
  if (whole.numel() != piece.numel() * parts)
    refuse(what,
           std::string(whole_name) + " tensor size must be equal to world_size times " + piece_name + " tensor size");
}

void require_root_list(const char* what, const std::vector<std::vector<at::Tensor>>& lists, bool root, int world,
                       const char* kind) {
  if (!root) {
    if (!lists.empty()) refuse(what, std::string("requires empty ") + kind + " on non-root");
    return;
  }
  if (lists.size() != 1)
    refuse(what, std::string("requires a single-element ") + kind + " list containing a list with " +
                     std::to_string(world) + " tensors.");
  if (lists[0].size() != static_cast<std::size_t>(world))
    refuse(what, std::string("Incorrect ") + kind + " list size " + std::to_string(lists[0].size()) + ". " +
                     (kind[0] == 'i' ? "Input" : "Output") + " list size should be " + std::to_string(world) +
                     ", same as size of the process group.");
}

std::vector<std::span<std::byte>> cut(std::span<std::byte> whole, int parts) {
  std::vector<std::span<std::byte>> out;
  std::size_t each = whole.size() / static_cast<std::size_t>(parts);
  for (int part = 0; part < parts; ++part) out.push_back(whole.subspan(static_cast<std::size_t>(part) * each, each));
  return out;
}

std::vector<std::span<std::byte>> cut_rows(const char* what, const at::Tensor& tensor, std::span<std::byte> memory,
                                           const std::vector<int64_t>& rows, int parts) {
  if (tensor.dim() == 0) refuse(what, "a tensor without dimensions cannot be split");
  if (rows.empty()) {
    if (tensor.size(0) % parts != 0) refuse(what, "Tensor's dim 0 does not divide equally across group size");
    return cut(memory, parts);
  }
  if (rows.size() != static_cast<std::size_t>(parts)) refuse(what, "Number of tensor splits not equal to group size");
  if (std::accumulate(rows.begin(), rows.end(), int64_t{0}) != tensor.size(0))
    refuse(what, "Split sizes doesn't match total dim 0 size");
  std::size_t row_bytes = tensor.size(0) > 0 ? memory.size() / static_cast<std::size_t>(tensor.size(0)) : 0;
  std::vector<std::span<std::byte>> out;
  std::size_t at = 0;
  for (int64_t count : rows) {
    if (count < 0) refuse(what, "a split size of " + std::to_string(count));
    std::size_t bytes = static_cast<std::size_t>(count) * row_bytes;
    out.push_back(memory.subspan(at, bytes));
    at += bytes;
  }
  return out;
}

}  // namespace ringdp
