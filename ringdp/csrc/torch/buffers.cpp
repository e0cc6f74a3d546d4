#include "torch/buffers.h"

#include "base/error.h"

namespace ringdp {
namespace {

[[noreturn]] void refuse(const char* what, const std::string& why) {
  throw Error(ErrorKind::kValue, std::string(what) + ": " + why);
}

}  // namespace

DType dtype_of(const at::Tensor& tensor, const char* what) {
  if (tensor.layout() != at::kStrided) refuse(what, "only supports dense tensors, not " + c10::str(tensor.layout()));
  if (!tensor.device().is_cpu())
    refuse(what, "the ring backend moves CPU tensors, not one on " + tensor.device().str() +
                     "; initialise with \"cpu:ring,cuda:nccl\" for CUDA tensors");
  switch (tensor.scalar_type()) {
    case at::kByte:
      return DType::kUint8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kUInt16:
      return DType::kUint16;
    case at::kUInt32:
      return DType::kUint32;
    case at::kUInt64:
      return DType::kUint64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBfloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBool:
      return DType::kBool;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    default:
      refuse(what, "tensors of type " + std::string(c10::toString(tensor.scalar_type())) + " are not supported");
  }
}

ReduceOp reduce_op_of(const c10d::ReduceOp& op, const char* what) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    default:
      refuse(what, "this reduce op is not supported; there are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR");
  }
}

std::span<std::byte> Buffers::input(const at::Tensor& tensor) { return add(tensor, true, false); }
std::span<std::byte> Buffers::output(const at::Tensor& tensor) { return add(tensor, false, true); }
std::span<std::byte> Buffers::in_place(const at::Tensor& tensor) { return add(tensor, true, true); }

std::span<std::byte> Buffers::add(const at::Tensor& tensor, bool read, bool write) {
  dtype_of(tensor, what_);
  at::Tensor flat = tensor;
  if (!tensor.is_contiguous()) {
    flat = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous).requires_grad(false));
    strided_.push_back({tensor, flat, read, write});
  }
  kept_.push_back(flat);
  return {static_cast<std::byte*>(flat.data_ptr()), flat.nbytes()};
}

void Buffers::before() {
  at::NoGradGuard no_grad;
  for (Strided& it : strided_)
    if (it.read) it.flat.copy_(it.user);
}

void Buffers::after() {
  at::NoGradGuard no_grad;
  for (Strided& it : strided_)
    if (it.write) it.user.detach().copy_(it.flat);
}

}  // namespace ringdp
