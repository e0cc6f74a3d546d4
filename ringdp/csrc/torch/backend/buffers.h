// Buffers: tensors as flat bytes and an element type, for the core. Refuses tensors that the core does not support.
// Owned by the operation and its Work together. Any thread; tensors are only read, unless said otherwise.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "base/types.h"
#include "torch/device/device_side.h"

namespace ringdp {

// Throws Error(kValue) naming `what` for tensors that are not dense, neither on the CPU nor on CUDA, or of a type
// without a wire format.
DType dtype_of(const at::Tensor& tensor, const char* what);
// Of any tensor; throws Error(kValue) for a type without a wire format.
DType element_type(at::ScalarType type, const char* what);
// PREMUL_SUM is a SUM of inputs times a factor, which Buffers takes.
ReduceOp reduce_op_of(const c10d::ReduceOp& op, const char* what);

// Whether two of them have a storage in common; cheap, and true for disjoint views of one storage too.
bool share_memory(const std::vector<at::Tensor>& tensors);
// Whether the byte ranges from first to last element overlap; neither may be empty.
bool memory_overlaps(const at::Tensor& one, const at::Tensor& other);

// The tensors of one operation. On the CPU contiguous ones are used in place; others through a flat copy, filled when
// the operation starts and copied back copies after the operation. Those on a device, one per operation, have a mirror
// in pinned memory; if not contiguous, it mirrors a flat copy on the device. Shared by the operation and its Work.
class Buffers {
 public:
  Buffers(DeviceSide& devices, const char* what) : devices_(devices), what_(what) {}
  // Of a reduction: inputs times the factor of a PREMUL_SUM. Throws Error(kValue) if `tensor` cannot be multiplied.
  Buffers(DeviceSide& devices, const char* what, const c10d::ReduceOp& op, const at::Tensor& tensor);
  ~Buffers();  // waits for copies if the operation was not submitted
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // One tensor, or the concatenation of several.
  std::span<std::byte> input(at::TensorList tensors) { return join(tensors, true, false); }
  // A copy at the start of the operation, so that results may overwrite it.
  std::span<std::byte> copied_input(const at::Tensor& tensor) { return join(tensor, true, false, true); }
  std::span<std::byte> output(at::TensorList tensors) { return join(tensors, false, true); }
  std::span<std::byte> in_place(at::TensorList tensors) { return join(tensors, true, true); }
  // The reduction of several, which all of them receive.
  std::span<std::byte> merged(const std::vector<at::Tensor>& tensors, ReduceOp op);
  void repeat(const at::Tensor& from, const std::vector<at::Tensor>& to);  // when it is complete

  void before();  // fills the flat copies
  void after();   // copies results back
  bool copies() const { return !at_start_.empty() || !at_end_.empty(); }

  const std::shared_ptr<Staging>& staging() const { return staging_; }  // null: no tensor is on a device
  const std::vector<DeviceUse>& uses() const { return uses_; }

 private:
  std::span<std::byte> stage(at::TensorList tensors, bool read, bool write);
  std::span<std::byte> stage_merged(const std::vector<at::Tensor>& tensors, DType dtype, ReduceOp op);
  void multiply_at_start(const at::Tensor& host);
  void use(const at::Tensor& tensor, bool write);
  std::span<std::byte> join(at::TensorList tensors, bool read, bool write, bool copied = false);
  std::span<std::byte> keep(const at::Tensor& flat);

  DeviceSide& devices_;  // used during the caller's call only
  const char* what_;
  const at::Tensor premultiplier_;  // [1]; undefined unless the op is PREMUL_SUM
  std::vector<at::Tensor> kept_;
  std::vector<std::function<void()>> at_start_;
  std::vector<std::function<void()>> at_end_;
  std::shared_ptr<Staging> staging_;  // shared with the operation, and with the Work, which orders streams after it
  std::optional<c10::Device> device_;
  std::vector<DeviceUse> uses_;
};

}  // namespace ringdp
