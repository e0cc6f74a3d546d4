#include "torch/backend/buffers.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "kernels/kernels.h"

namespace ringdp {
namespace {

[[noreturn]] void refuse_tensor(const char* what, const std::string& why) {
  throw Error(ErrorKind::kValue, std::string(what) + ": " + why);
}

}  // namespace

DType element_type(at::ScalarType type, const char* what) {
  switch (type) {
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
    case at::kComplexHalf:
      return DType::kComplex32;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4m3fn;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5m2;
    case at::kFloat8_e4m3fnuz:
      return DType::kFloat8E4m3fnuz;
    case at::kFloat8_e5m2fnuz:
      return DType::kFloat8E5m2fnuz;
    case at::kFloat8_e8m0fnu:
      return DType::kFloat8E8m0fnu;
    case at::kFloat4_e2m1fn_x2:
      return DType::kFloat4E2m1fnX2;
    default:
      refuse_tensor(what, "tensors of type " + std::string(c10::toString(type)) + " are not supported");
  }
}

DType dtype_of(const at::Tensor& tensor, const char* what) {
  if (tensor.layout() != at::kStrided)
    refuse_tensor(what, "only supports dense tensors, not " + c10::str(tensor.layout()));
  if (!tensor.is_cpu() && !tensor.is_cuda())
    refuse_tensor(what, "the ring backend moves CPU and CUDA tensors, not one on " + tensor.device().str());
  return element_type(tensor.scalar_type(), what);
}

ReduceOp reduce_op_of(const c10d::ReduceOp& op, const char* what) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
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
      refuse_tensor(
          what,
          "this reduce op is not supported; there are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR and PREMUL_SUM");
  }
}

bool share_memory(const std::vector<at::Tensor>& tensors) {
  std::set<const void*> seen;
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() > 0 && !seen.insert(tensor.storage().data()).second;
  });
}

namespace {

at::Tensor premultiplier_of(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* what) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return {};
  if (!tensor.is_floating_point() && !tensor.is_complex())
    refuse_tensor(what, "PREMUL_SUM multiplies floating-point tensors, not those of type " +
                            std::string(c10::toString(tensor.scalar_type())));
  auto* supplement = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) refuse_tensor(what, "this PREMUL_SUM has no factor");
  if (supplement->tensor_factor.defined()) return supplement->tensor_factor;
  return at::scalar_tensor(supplement->double_factor, at::kDouble);
}

// The bytes from its first element to its last, gaps included.
std::span<const std::byte> extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto bytes = static_cast<std::size_t>(last + 1) * tensor.element_size();
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), bytes};
}

}  // namespace

bool memory_overlaps(const at::Tensor& one, const at::Tensor& other) {
  const auto a = extent(one), b = extent(other);
  return a.data() < b.data() + b.size() && b.data() < a.data() + a.size();
}

Buffers::Buffers(DeviceSide& devices, const char* what, const c10d::ReduceOp& op, const at::Tensor& tensor)
    : devices_(devices), what_(what), premultiplier_(premultiplier_of(op, tensor, what)) {}

std::span<std::byte> Buffers::keep(const at::Tensor& flat) {
  kept_.push_back(flat);
  return {static_cast<std::byte*>(flat.data_ptr()), flat.nbytes()};
}

std::span<std::byte> Buffers::join(at::TensorList tensors, bool read, bool write, bool copied) {
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) {
    dtype_of(tensor, what_);
    count += tensor.numel();
  }
  if (count == 0) return {};
  bool scale = read && premultiplier_.defined();
  if (DeviceSide::stages(tensors[0])) {
    const std::span<std::byte> memory = stage(tensors, read, write);
    if (scale) multiply_at_start(kept_.back().view(tensors[0].scalar_type()));
    return memory;
  }
  if (tensors.size() == 1 && tensors[0].is_contiguous() && !scale && !copied) return keep(tensors[0]);
  at::Tensor flat = at::empty({count}, tensors[0].options().requires_grad(false));
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    at::Tensor part = flat.narrow(0, at, tensor.numel()).view(tensor.sizes());
    at += tensor.numel();
    if (read)
      at_start_.emplace_back([part, tensor, scale, factor = premultiplier_] {
        part.copy_(tensor);
        if (scale) part.mul_(factor);
      });
    if (write) at_end_.emplace_back([part, tensor] { tensor.detach().copy_(part); });
  }
  return keep(flat);
}

std::span<std::byte> Buffers::merged(const std::vector<at::Tensor>& tensors, ReduceOp op) {
  if (tensors.size() == 1) return in_place(tensors[0]);
  DType dtype = dtype_of(tensors[0], what_);
  if (op == ReduceOp::kAvg) refuse_tensor(what_, "AVG takes one tensor per rank");
  if (tensors[0].numel() > 0 && DeviceSide::stages(tensors[0])) return stage_merged(tensors, dtype, op);
  at::Tensor flat = at::empty({tensors[0].numel()}, tensors[0].options().requires_grad(false));
  at_start_.emplace_back([flat, tensors, dtype, op, factor = premultiplier_] {
    flat.copy_(tensors[0].reshape({-1}));
    for (std::size_t i = 1; i < tensors.size(); ++i) {
      at::Tensor next = tensors[i].reshape({-1}).contiguous();
      reduce_kernels(dtype, op).combine(flat.data_ptr(), flat.data_ptr(), next.data_ptr(),
                                        static_cast<std::size_t>(flat.numel()));
    }
    if (factor.defined()) flat.mul_(factor);
  });
  at_end_.emplace_back([flat, tensors] {
    for (const at::Tensor& tensor : tensors) tensor.detach().copy_(flat.view(tensor.sizes()));
  });
  return keep(flat);
}

void Buffers::repeat(const at::Tensor& from, const std::vector<at::Tensor>& to) {
  for (const at::Tensor& tensor : to) {
    if (tensor.is_same(from) || tensor.numel() == 0) continue;
    if (!DeviceSide::stages(tensor)) {
      at_end_.emplace_back([from, tensor] { tensor.detach().copy_(from); });
      continue;
    }
    use(tensor, true);
    staging_->at_end([from, tensor] {
      const c10::InferenceMode inference;
      tensor.detach().copy_(from);
    });
  }
}

// ---- On devices ----

void Buffers::use(const at::Tensor& tensor, bool write) {
  if (device_ && *device_ != tensor.device())
    refuse_tensor(what_, "tensors on " + device_->str() + " and on " + tensor.device().str() +
                             ": those of one operation must be on one device");
  device_ = tensor.device();
  kept_.push_back(tensor);
  if (tensor.numel() > 0) {
    devices_.wait_for_earlier({extent(tensor), write});
    uses_.push_back({extent(tensor), write});
  }
  if (!staging_) staging_ = devices_.make_staging(*device_, what_);
}

// For other strides than those of a flat buffer the device copies into a flat one, and back.
std::span<std::byte> Buffers::stage(at::TensorList tensors, bool read, bool write) {
  const c10::InferenceMode inference;  // as in `before`
  const c10::DeviceGuard guard(tensors[0].device());
  for (const at::Tensor& tensor : tensors) use(tensor, write);
  at::Tensor flat = tensors[0];
  if (tensors.size() > 1 || !flat.is_contiguous()) {
    int64_t count = 0;
    for (const at::Tensor& tensor : tensors) count += tensor.numel();
    flat = at::empty({count}, flat.options().requires_grad(false));
    int64_t at = 0;
    for (const at::Tensor& tensor : tensors) {
      at::Tensor part = flat.narrow(0, at, tensor.numel()).view(tensor.sizes());
      at += tensor.numel();
      if (read) part.copy_(tensor);
      if (write)
        staging_->at_end([part, tensor] {
          const c10::InferenceMode inference;
          tensor.detach().copy_(part);
        });
    }
  }
  const at::Tensor host = DeviceSide::make_mirror(flat.nbytes(), *device_);
  kept_.insert(kept_.end(), {flat, host});  // the mirror is the last one
  const std::span<std::byte> memory{static_cast<std::byte*>(host.mutable_data_ptr()), flat.nbytes()};
  staging_->queue().after_caller();
  staging_->mirror(memory, static_cast<std::byte*>(flat.mutable_data_ptr()), read, write);
  return memory;
}

std::span<std::byte> Buffers::stage_merged(const std::vector<at::Tensor>& tensors, DType dtype, ReduceOp op) {
  const std::span<std::byte> sum = stage(tensors[0], true, true);
  const at::Tensor values = kept_.back();
  const auto count = static_cast<std::size_t>(tensors[0].numel());
  for (std::size_t i = 1; i < tensors.size(); ++i)
    at_start_.emplace_back([sum, next = stage(tensors[i], true, false), dtype, op, count] {
      reduce_kernels(dtype, op).combine(sum.data(), sum.data(), next.data(), count);
    });
  multiply_at_start(values.view(tensors[0].scalar_type()));
  repeat(tensors[0], tensors);
  return sum;
}

void Buffers::multiply_at_start(const at::Tensor& host) {
  if (premultiplier_.defined()) at_start_.emplace_back([host, factor = premultiplier_.cpu()] { host.mul_(factor); });
}

Buffers::~Buffers() {
  try {
    if (staging_ && !staging_->landed()) staging_->queue().wait();
  } catch (const std::exception&) {  // after a fork, or if the device has failed: no copies run any more
  }
}

// The driving thread is outside the caller's inference_mode, which is needed to change inference tensors; other
// tensors may be changed in it, too.
void Buffers::before() {
  const c10::InferenceMode inference;
  for (auto& step : at_start_) step();
}

void Buffers::after() {
  const c10::InferenceMode inference;
  for (auto& step : at_end_) step();
}

}  // namespace ringdp
