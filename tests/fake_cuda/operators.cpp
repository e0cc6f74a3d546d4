// Operators on tensors of the fake device. What an operator returns is made at once, in the shape that its Meta kernel
// gives; its CPU kernel runs on the bare addresses when the stream gets there. Where the shape depends on the numbers
// the host waits, as it does on a GPU.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "fake.h"

namespace fake_cuda {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::IValue;
using torch::jit::Stack;

// A tensor of the CPU on the memory of this one, without a reference to it: what a kernel has of it.
Tensor on_cpu(const Tensor& tensor) {
  auto* memory = static_cast<std::byte*>(tensor.storage().mutable_data());
  if (memory != nullptr) {
    memory += tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
    if (tensor.is_cuda()) memory = Machine::here().twin(memory);
  }
  return at::for_blob(memory, tensor.sizes())
      .strides(tensor.strides())
      .options(at::TensorOptions().dtype(tensor.scalar_type()))
      .target_device(at::kCPU)
      .make_tensor();
}

Tensor on_meta(const Tensor& tensor) {
  const auto options = tensor.options().device(at::kMeta).pinned_memory(std::nullopt);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

Tensor like(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice));
}

// The value with each tensor in it replaced, and a device by `device`.
template <class Each>
IValue mapped(const IValue& value, c10::Device device, const Each& each) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(each(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& tensor : value.toTensorVector()) out.push_back(each(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      out.push_back(tensor && tensor->defined() ? std::optional(each(*tensor)) : tensor);
    return out;
  }
  return value.isDevice() ? IValue(device) : value;
}

// The argument that a return value is, by the schema's aliases.
std::optional<std::size_t> argument_of(const c10::FunctionSchema& schema, std::size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  for (std::size_t i = 0; alias != nullptr && i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return i;
  }
  return std::nullopt;
}

class Call {
 public:
  Call(const c10::OperatorHandle& what, Stack* stack)
      : what_(what), args_(stack->end() - static_cast<std::ptrdiff_t>(schema().arguments().size()), stack->end()) {
    torch::jit::drop(stack, args_.size());
    // A CPU tensor among the arguments is copied now: kernels take scalars.
    for (const IValue& it : args_)
      host_->push_back(mapped(it, at::kCPU, [](const Tensor& t) { return t.is_cuda() ? on_cpu(t) : t.clone(); }));
  }

  void run(Stack* stack) {
    Stack meta;
    for (const IValue& it : args_)
      meta.push_back(
          mapped(it, at::kMeta, [](const Tensor& t) { return t.is_cuda() || t.dim() > 0 ? on_meta(t) : t; }));
    try {
      const at::AutoDispatchBelowAutograd below_autograd;
      what_.callBoxed(&meta);
    } catch (const std::exception&) {
      return run_at_once(stack);
    }
    queue_for(meta, stack);
  }

 private:
  const c10::FunctionSchema& schema() const { return what_.schema(); }

  void run_at_once(Stack* stack) {
    Machine::here().note_wait();
    Machine::here().wait_for_stream(current_stream());
    const at::AutoDispatchBelowAutograd below_autograd;
    what_.callBoxed(host_.get());
    for (std::size_t i = 0; i < schema().returns().size(); ++i) {
      const auto argument = argument_of(schema(), i);
      stack->push_back(argument ? args_[*argument] : mapped((*host_)[i], kDevice, [](const Tensor& t) {
        Tensor out = like(t);
        on_cpu(out).copy_(t);
        return out;
      }));
    }
  }

  void queue_for(const Stack& meta, Stack* stack) {
    std::vector<std::pair<std::size_t, std::vector<Tensor>>> results;
    for (std::size_t i = 0; i < schema().returns().size(); ++i) {
      if (const auto argument = argument_of(schema(), i)) {
        fit(*argument, meta[i]);
        stack->push_back(args_[*argument]);
        continue;
      }
      std::vector<Tensor> made;
      stack->push_back(mapped(meta[i], kDevice, [&](const Tensor& t) {
        Tensor out = like(t);
        made.push_back(on_cpu(out));
        return out;
      }));
      results.emplace_back(i, std::move(made));
    }
    queue([what = what_, host = host_, results] {
      what.callBoxed(host.get());
      for (const auto& [i, made] : results) {
        const IValue& value = (*host)[i];
        const std::vector<Tensor> found = value.isTensor() ? std::vector{value.toTensor()} : value.toTensorVector();
        for (std::size_t k = 0; k < made.size(); ++k)
          if (found[k].defined()) made[k].copy_(found[k]);
      }
    });
  }

  // `out=` of another size.
  void fit(std::size_t argument, const IValue& result) {
    if (!args_[argument].isTensor()) return;
    const Tensor& tensor = args_[argument].toTensor();
    if (tensor.sizes() == result.toTensor().sizes()) return;
    tensor.resize_(result.toTensor().sizes());
    (*host_)[argument] = on_cpu(tensor);
  }

  const c10::OperatorHandle what_;
  const Stack args_;
  const std::shared_ptr<Stack> host_ = std::make_shared<Stack>();
};

void any_operator(const c10::OperatorHandle& what, c10::DispatchKeySet, Stack* stack) { Call(what, stack).run(stack); }

// ---- What has no kernel of another device to follow: memory, views, copies.

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::kFloat));
}

Tensor view_of(const Tensor& self, at::ScalarType dtype, IntArrayRef size, IntArrayRef stride, int64_t offset) {
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                        self.key_set(), c10::scalarTypeToTypeMeta(dtype));
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return out;
}

Tensor strided_view(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return view_of(self, self.scalar_type(), size, stride, offset.value_or(self.storage_offset()));
}

Tensor view_as_real(const Tensor& self) {
  auto sizes = self.sizes().vec(), strides = self.strides().vec();
  for (int64_t& it : strides) it *= 2;
  sizes.push_back(2);
  strides.push_back(1);
  return view_of(self, c10::toRealValueType(self.scalar_type()), sizes, strides, 2 * self.storage_offset());
}

Tensor view_as_complex(const Tensor& self) {
  auto sizes = self.sizes().vec(), strides = self.strides().vec();
  TORCH_CHECK(!sizes.empty() && sizes.back() == 2 && strides.back() == 1,
              "Tensor must have a last dimension of size 2");
  sizes.pop_back();
  strides.pop_back();
  for (int64_t& it : strides) it /= 2;
  return view_of(self, c10::toComplexType(self.scalar_type()), sizes, strides, self.storage_offset() / 2);
}

// Of another type: the last dimension's elements become fewer, or more.
Tensor view_as_type(const Tensor& self, at::ScalarType dtype) {
  const auto from = static_cast<int64_t>(self.element_size()), to = static_cast<int64_t>(c10::elementSize(dtype));
  auto sizes = self.sizes().vec(), strides = self.strides().vec();
  if (from != to) {
    TORCH_CHECK(!sizes.empty() && strides.back() == 1, "self.stride(-1) must be 1 to view as another size of element");
    sizes.back() = sizes.back() * from / to;
    for (std::size_t i = 0; i + 1 < strides.size(); ++i) strides[i] = strides[i] * from / to;
  }
  return view_of(self, dtype, sizes, strides, self.storage_offset() * from / to);
}

Tensor view(const Tensor& self, IntArrayRef size) {
  const auto shape = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), shape);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return strided_view(self, shape, *stride, self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return strided_view(self, size, stride, self.storage_offset());
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  auto sizes = self.sizes().vec(), strides = self.strides().vec();
  const auto d = static_cast<std::size_t>(at::maybe_wrap_dim(dimension, self.dim()));
  sizes.push_back(size);
  strides.push_back(strides[d]);
  sizes[d] = (sizes[d] - size) / step + 1;
  strides[d] *= step;
  return strided_view(self, sizes, strides, self.storage_offset());
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto dense = c10::contiguous_strides(size);
  impl->set_sizes_and_strides(size, stride.empty() ? IntArrayRef(dense) : stride, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

Tensor& set_nothing(Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0, {0}, {1});
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const std::size_t bytes = static_cast<std::size_t>(impl->numel() + impl->storage_offset()) * impl->itemsize();
  c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  const std::size_t before = storage->nbytes();
  if (before >= bytes) return self;
  c10::DataPtr fresh = allocator()->allocate(bytes);
  if (before > 0) {
    auto* to = Machine::here().twin(static_cast<std::byte*>(fresh.get()));
    const auto* from = Machine::here().twin(static_cast<const std::byte*>(storage->data()));
    queue([=] { std::memcpy(to, from, before); });
  }
  storage->set_data_ptr(std::move(fresh));
  storage->set_nbytes(bytes);
  return self;
}

// Between pinned memory and the device late; pageable memory is taken at once, and waited for on the way back. Pinned
// memory that its tensor gives back meanwhile stays until the copy has come, as with torch's allocator.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const Tensor from = source.expand(self.sizes());
  const Tensor& host = self.is_cuda() ? from : self;
  const bool late = host.is_cuda() || (non_blocking && is_pinned(host.storage().data()));
  const Tensor taken = late || !self.is_cuda() ? on_cpu(from) : from.clone();
  queue([to = on_cpu(self), taken, pinned = host.storage()]() mutable { to.copy_(taken); });
  if (!late && !self.is_cuda()) {
    Machine::here().note_wait();
    Machine::here().wait_for_stream(current_stream());
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& destination, bool non_blocking) {
  Tensor to = destination;
  copy_(to, self, non_blocking);
  return destination;
}

at::Scalar local_scalar(const Tensor& self) {
  Tensor host = at::empty({}, self.options().device(at::kCPU));
  copy_(host, strided_view(self, {}, {}, self.storage_offset()), false);
  return host.item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  Machine::here().note_use(self.storage().mutable_data(), stream.id());
}

// A torch that has CUDA has kernels for it, which look for a GPU: none of them is called.
std::vector<c10::RegistrationHandleRAII> stand_in_for_kernels() {
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silence;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&silence);  // torch says once that one is overridden
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::RegistrationHandleRAII> handles;
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA))
    if (name.name.starts_with("aten::"))  // c10d's collectives, in any torch, go to the process group
      handles.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                                c10::KernelFunction::makeFromBoxedFunction<&any_operator>(),
                                                std::nullopt, nullptr, "the fake device"));
  return handles;
}
const std::vector<c10::RegistrationHandleRAII> kernels_stand_ins = stand_in_for_kernels();

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(strided_view));
  library.impl("view", TORCH_FN(view));
  library.impl("view.dtype", TORCH_FN(view_as_type));
  library.impl("view_as_real", TORCH_FN(view_as_real));
  library.impl("view_as_complex", TORCH_FN(view_as_complex));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("unfold", TORCH_FN(unfold));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  library.impl("set_", TORCH_FN(set_nothing));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  library.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace fake_cuda
