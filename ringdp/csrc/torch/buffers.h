// Tensors as the core sees them: flat bytes and an element type. What the core cannot take is refused here, in words.
// Any thread; tensors are only looked at.
#pragma once

#include <ATen/ATen.h>

#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "base/types.h"

namespace ringdp {

// Throws Error(kValue) naming `what` for tensors that are not dense, not on the CPU, or of a type without a wire format.
DType dtype_of(const at::Tensor& tensor, const char* what);
ReduceOp reduce_op_of(const c10d::ReduceOp& op, const char* what);

// The tensors of one operation. Contiguous ones are used in place; others through a flat copy, filled when the operation
// starts and copied back when it is complete. Shared by the operation and its Work.
class Buffers {
 public:
  explicit Buffers(const char* what) : what_(what) {}

  std::span<std::byte> input(const at::Tensor& tensor);
  std::span<std::byte> output(const at::Tensor& tensor);
  std::span<std::byte> in_place(const at::Tensor& tensor);

  void before();  // fills the flat copies
  void after();   // copies results back
  bool copies() const { return !strided_.empty(); }

 private:
  struct Strided {
    at::Tensor user;
    at::Tensor flat;
    bool read;
    bool write;
  };

  std::span<std::byte> add(const at::Tensor& tensor, bool read, bool write);

  const char* what_;
  std::vector<at::Tensor> kept_;
  std::vector<Strided> strided_;
};

}  // namespace ringdp
