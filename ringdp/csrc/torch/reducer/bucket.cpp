#include "torch/reducer/bucket.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace ringdp {
namespace {

constexpr std::size_t kHugePageFromBytes = std::size_t{4} << 20;
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kPlainCopyBytes = std::size_t{256} << 10;  // above, several threads are faster

// Before the first access. Advice only: if it fails the pages are ordinary ones.
void ask_for_huge_pages(const at::Tensor& buffer) {
  const std::size_t bytes = buffer.nbytes();
  if (!buffer.is_cpu() || bytes < kHugePageFromBytes) return;
  const auto begin = reinterpret_cast<uintptr_t>(buffer.data_ptr());
  const uintptr_t first = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t last = (begin + bytes) / kHugePageBytes * kHugePageBytes;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

bool plain_memory(const at::Tensor& tensor) {
  const at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor() && !impl->is_python_dispatch();
}

// Since torch 2.13 a Python object has a reference of its own to its tensor or storage, and lives as long as another
// reference does.
template <class GradientState>
bool python_only_preserves(GradientState* gradient_state) {
  if constexpr (requires { gradient_state->has_unique_reference(); }) {
    return gradient_state->has_unique_reference();
  } else {
    return false;
  }
}

template <class GradientState>
bool used_elsewhere(std::size_t references, GradientState* gradient_state, std::size_t ours = 1) {
  return references > ours && (references > ours + 1 || !python_only_preserves(gradient_state));
}

// As a template, since torch 2.9 and earlier have no grad_dtype.
template <class Tensor>
std::optional<c10::ScalarType> gradient_dtype_of(const Tensor& parameter) {
  if constexpr (requires { parameter.grad_dtype(); }) {
    if (parameter.is_leaf()) return parameter.grad_dtype();
  }
  return parameter.scalar_type();
}

at::Tensor view_like(const at::Tensor& parameter, const at::Tensor& memory, int64_t offset) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto first = memory.storage_offset() + offset;
  at::Tensor view = at::empty({0}, memory.options());
  if (parameter.is_non_overlapping_and_dense()) {
    view.set_(memory.storage(), first, parameter.sizes(), parameter.strides());
  } else {
    view.set_(memory.storage(), first, parameter.sizes(), c10::contiguous_strides(parameter.sizes()));
  }
  return view;
}

// Dense memory in the same order, which one thread copies as fast as several.
bool lie_alike(const at::Tensor& dst, const at::Tensor& src) {
  return plain_memory(src) && plain_memory(dst) && src.scalar_type() == dst.scalar_type() &&
         src.strides() == dst.strides() && src.sizes() == dst.sizes() &&
         (dst.nbytes() <= kPlainCopyBytes || at::get_num_threads() == 1);
}

template <class T>
void multiply_elements(const at::Tensor& dst, const at::Tensor& src, double factor) {
  auto* const to = static_cast<T*>(dst.mutable_data_ptr());
  const auto* const from = static_cast<const T*>(src.const_data_ptr());
  const auto by = static_cast<T>(factor);
  const int64_t count = dst.numel();
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * by;
}

}  // namespace

std::optional<c10::ScalarType> gradient_dtype(const at::Tensor& parameter) { return gradient_dtype_of(parameter); }

bool held_elsewhere(const at::Tensor& tensor) {
  return used_elsewhere(tensor.use_count(), tensor.unsafeGetTensorImpl()->pyobj_slot());
}

bool other_tensors_on_memory(const at::Tensor& tensor, std::size_t tensors) {
  const at::Storage& storage = tensor.storage();
  return used_elsewhere(storage.use_count(), storage.unsafeGetStorageImpl()->pyobj_slot(), tensors);
}

// torch marks memory that a NumPy array or another process shares as not resizable.
bool memory_held_elsewhere(const at::Tensor& tensor, std::size_t tensors) {
  if (tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.unsafeGetTensorImpl()->is_python_dispatch())
    return false;
  return !tensor.storage().resizable() || other_tensors_on_memory(tensor, tensors);
}

void allocate_bucket(Bucket& bucket, c10::Device device, std::size_t mark_count) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto options = at::TensorOptions().dtype(bucket.dtype).device(device);
  const auto numel = static_cast<int64_t>(bucket.memory.numel);
  bucket.buffer = at::empty({numel + static_cast<int64_t>(mark_count)}, options);
  ask_for_huge_pages(bucket.buffer);
  bucket.buffer.zero_();
  bucket.gradients = mark_count == 0 ? bucket.buffer : bucket.buffer.narrow(0, 0, numel);
  bucket.marks = mark_count == 0 ? at::Tensor() : bucket.buffer.narrow(0, numel, static_cast<int64_t>(mark_count));
}

at::Tensor gradient_view(const Bucket& bucket, std::size_t position, const at::Tensor& parameter) {
  return view_like(parameter, bucket.buffer, static_cast<int64_t>(bucket.memory.offsets[position]));
}

at::Tensor as_parameter(const at::Tensor& flat, const at::Tensor& parameter) { return view_like(parameter, flat, 0); }

at::Tensor as_buffer(const at::Tensor& gradient, const at::Tensor& parameter, c10::ScalarType dtype) {
  if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.is_conj() || gradient.is_neg() ||
      gradient._is_zerotensor() || gradient.unsafeGetTensorImpl()->is_python_dispatch() || gradient.requires_grad() ||
      gradient.scalar_type() != dtype || gradient.device() != parameter.device() ||
      gradient.sizes() != parameter.sizes()) {
    return {};
  }
  const bool dense = parameter.is_non_overlapping_and_dense();
  const bool same_order = dense ? gradient.strides() == parameter.strides() : gradient.is_contiguous();
  if (!same_order) return {};
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor buffer = at::empty({0}, gradient.options());
  return buffer.set_(gradient.storage(), gradient.storage_offset(), {gradient.numel()}, {1});
}

void leave_bucket(at::Tensor gradient) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor copy = gradient.clone();
  gradient.set_(copy.storage(), 0, copy.sizes(), copy.strides());
}

void remember_stream(Bucket& bucket) {
  const c10::Device device = bucket.buffer.device();
  if (device.is_cpu()) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (std::find(bucket.streams.begin(), bucket.streams.end(), current) == bucket.streams.end()) {
    bucket.streams.push_back(current);
  }
}

void wait_for_streams(Bucket& bucket) {
  if (bucket.streams.empty()) return;
  const c10::Device device = bucket.buffer.device();
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  for (const c10::Stream& stream : bucket.streams) {
    if (stream == current) continue;
    c10::Event written(device.type());
    written.record(stream);
    current.wait(written);
  }
  bucket.streams.clear();
}

void copy_gradient(const at::Tensor& dst, const at::Tensor& src) {
  if (lie_alike(dst, src)) {
    std::memcpy(dst.mutable_data_ptr(), src.const_data_ptr(), dst.nbytes());
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  dst.copy_(src.layout() == at::kStrided ? src : src.to_dense(), /*non_blocking=*/true);
}

void copy_gradient_times(const at::Tensor& dst, const at::Tensor& src, double factor) {
  if (factor == 1) return copy_gradient(dst, src);
  const c10::ScalarType type = dst.scalar_type();
  if (factor != 0 && (type == at::kFloat || type == at::kDouble) && lie_alike(dst, src))
    return type == at::kFloat ? multiply_elements<float>(dst, src, factor)
                              : multiply_elements<double>(dst, src, factor);
  if (factor != 0 && !dst.is_same(src)) copy_gradient(dst, src);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  factor == 0 ? dst.zero_() : dst.mul_(factor);
}

void multiply_gradient(const at::Tensor& gradient, double factor) {
  if (factor != 1) copy_gradient_times(gradient, gradient, factor);
}

at::Tensor gradient_times(const at::Tensor& gradient, double factor) {
  if (factor == 1) return gradient;
  return factor == 0 ? at::zeros_like(gradient) : gradient.mul(factor);
}

}  // namespace ringdp
