// The CUDA kernels for Python, over tensors of one device: `cuda_select` for compression/methods/sparse.py, the others
// for tests and benchmarks. They run asynchronously on the device's current stream. In a build without kernels
// `cuda_kernels` is False and the others raise.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>

#include "base/error.h"
#include "codec/codec.h"
#include "cuda/kernels.h"
#include "torch/bindings/bindings.h"
#include "torch/device/native_stream.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;
// both residuals, and the index of the current one
using MaybeFeedback = std::optional<std::tuple<Tensor, Tensor, Tensor>>;

[[noreturn]] void refuse_kernel_call(const std::string& why) { throw Error(ErrorKind::kValue, "cuda: " + why); }

// The arguments of one call, checked as they are taken: all on one device, contiguous.
class Arguments {
 public:
  template <class T>
  T* take(const Tensor& tensor, at::ScalarType type, const std::string& name, std::optional<std::size_t> numel = {}) {
    const bool here = tensor.is_cuda() && (!device_ || tensor.device() == *device_);
    if (!here || tensor.scalar_type() != type || !tensor.is_contiguous())
      refuse_kernel_call(name + " is " + c10::str(tensor.scalar_type()) + " on " + c10::str(tensor.device()) +
                         (tensor.is_contiguous() ? "" : ", not contiguous") + "; it must be " + c10::str(type) +
                         ", contiguous, on " + (device_ ? c10::str(*device_) : std::string("a CUDA device")));
    if (numel && static_cast<std::size_t>(tensor.numel()) != *numel)
      refuse_kernel_call(name + " has " + std::to_string(tensor.numel()) + " elements, not " + std::to_string(*numel));
    device_ = tensor.device();
    return static_cast<T*>(tensor.data_ptr());
  }
  template <class T>
  T* take_one(const MaybeTensor& tensor, at::ScalarType type, const std::string& name) {
    return tensor ? take<T>(*tensor, type, name, 1) : nullptr;
  }

  // Calls body(stream) if there were any.
  template <class Body>
  void run(Body&& body) const {
    if (!device_) return;
    const c10::DeviceGuard guard(*device_);
    const py::gil_scoped_release no_gil;
    body(native_stream(c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_)));
  }

 private:
  std::optional<c10::Device> device_;
};

void require_lengths(std::size_t wanted, std::initializer_list<std::size_t> lengths) {
  for (const std::size_t length : lengths)
    if (length != wanted)
      refuse_kernel_call("lists of " + std::to_string(wanted) + " and of " + std::to_string(length) + " tensors");
}

std::size_t numel_of(const Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

DType dtype_of_gradient(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBfloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    default:
      refuse_kernel_call(c10::str(tensor.scalar_type()) + " has no infinities to look for");
  }
}

cuda::Feedback feedback_of(Arguments& arguments, const std::vector<MaybeFeedback>& all, std::size_t i,
                           std::size_t count) {
  if (all.empty() || !all[i]) return {};
  const auto& [first, second, which] = *all[i];
  return {{arguments.take<float>(first, at::kFloat, "the first residual", count),
           arguments.take<float>(second, at::kFloat, "the second residual", count)},
          arguments.take<int32_t>(which, at::kInt, "which", 1)};
}

void encode(const std::string& codec, const Tensors& xs, const Tensors& codes,
            const std::vector<MaybeFeedback>& feedback, float loss_scale, const MaybeTensor& non_finite) {
  const Codec& it = ringdp::codec(codec_by_name(codec));
  require_lengths(xs.size(), {codes.size(), feedback.empty() ? xs.size() : feedback.size()});
  Arguments arguments;
  std::vector<cuda::EncodeRun> runs;
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const std::size_t count = numel_of(xs[i]);
    runs.push_back({arguments.take<float>(xs[i], at::kFloat, "x"),
                    arguments.take<std::byte>(codes[i], at::kByte, "the code", it.encoded_bytes(count)), count,
                    feedback_of(arguments, feedback, i, count)});
  }
  auto* flag = arguments.take_one<int32_t>(non_finite, at::kInt, "non_finite");
  arguments.run([&](cuda::Stream stream) { cuda::encode(it.id, runs, loss_scale, flag, stream); });
}

void decode_set(const std::string& codec, const Tensors& outs, const Tensors& codes, const MaybeTensor& non_finite) {
  const Codec& it = ringdp::codec(codec_by_name(codec));
  require_lengths(outs.size(), {codes.size()});
  Arguments arguments;
  std::vector<cuda::DecodeRun> runs;
  for (std::size_t i = 0; i < outs.size(); ++i) {
    const std::size_t count = numel_of(outs[i]);
    runs.push_back({arguments.take<float>(outs[i], at::kFloat, "out"),
                    arguments.take<std::byte>(codes[i], at::kByte, "the code", it.encoded_bytes(count)), count});
  }
  auto* flag = arguments.take_one<int32_t>(non_finite, at::kInt, "non_finite");
  arguments.run([&](cuda::Stream stream) { cuda::decode_set(it.id, runs, flag, stream); });
}

void reduce_codes(const std::string& codec, const Tensors& xs, const Tensors& sources, const Tensors& codes, int own,
                  float divisor, const std::vector<MaybeFeedback>& feedback, float loss_scale,
                  const MaybeTensor& non_finite) {
  const Codec& it = ringdp::codec(codec_by_name(codec));
  require_lengths(xs.size(), {sources.size(), codes.size(), feedback.empty() ? xs.size() : feedback.size()});
  Arguments arguments;
  std::vector<cuda::ReduceRun> runs;
  int64_t ranks = 0;
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const std::size_t count = numel_of(xs[i]);
    if (sources[i].dim() != 2 || (i > 0 && sources[i].size(0) != ranks) ||
        static_cast<std::size_t>(sources[i].size(1)) < it.encoded_bytes(count))
      refuse_kernel_call("the sources' codes must be [ranks, at least " + std::to_string(it.encoded_bytes(count)) +
                         "], not " + c10::str(sources[i].sizes()));
    ranks = sources[i].size(0);
    runs.push_back({arguments.take<float>(xs[i], at::kFloat, "x"),
                    arguments.take<std::byte>(sources[i], at::kByte, "the sources' codes"),
                    static_cast<std::size_t>(sources[i].size(1)),
                    arguments.take<std::byte>(codes[i], at::kByte, "the code", it.encoded_bytes(count)), count,
                    feedback_of(arguments, feedback, i, count)});
  }
  auto* flag = arguments.take_one<int32_t>(non_finite, at::kInt, "non_finite");
  arguments.run([&](cuda::Stream stream) {
    cuda::reduce_codes(it.id, runs, static_cast<int>(ranks), own, divisor, loss_scale, flag, stream);
  });
}

void find_non_finite(const Tensor& values, const Tensor& found) {
  Arguments arguments;
  const void* first = arguments.take<void>(values, values.scalar_type(), "values");
  auto* flag = arguments.take<int32_t>(found, at::kInt, "found", 1);
  const DType dtype = dtype_of_gradient(values);
  arguments.run([&](cuda::Stream stream) { cuda::find_non_finite(first, numel_of(values), dtype, flag, stream); });
}

std::tuple<Tensor, Tensor, Tensor> select(const Tensor& x, float threshold, int64_t capacity) {
  const auto scratch_bytes = static_cast<int64_t>(cuda::select_scratch_bytes(numel_of(x)));
  Arguments arguments;
  const auto* elements = arguments.take<float>(x, at::kFloat, "x");
  const auto room = [&](int64_t numel, at::ScalarType type) { return at::empty({numel}, x.options().dtype(type)); };
  Tensor index = room(capacity, at::kInt), value = room(capacity, at::kFloat), selected = room(1, at::kInt);
  const Tensor scratch = room(scratch_bytes, at::kByte);
  arguments.run([&](cuda::Stream stream) {
    cuda::select(elements, numel_of(x), threshold, static_cast<uint32_t*>(index.data_ptr()),
                 value.mutable_data_ptr<float>(), numel_of(index), static_cast<uint32_t*>(selected.data_ptr()),
                 scratch.mutable_data_ptr(), stream);
  });
  return {index, value, selected};
}

void commit(const Tensors& which, const MaybeTensor& non_finite) {
  Arguments arguments;
  std::vector<int32_t*> switches;
  for (const Tensor& it : which) switches.push_back(arguments.take<int32_t>(it, at::kInt, "which", 1));
  auto* flag = arguments.take_one<int32_t>(non_finite, at::kInt, "non_finite");
  arguments.run([&](cuda::Stream stream) { cuda::commit(switches, flag, stream); });
}

}  // namespace

void bind_cuda_kernels(py::module_& module) {
  module.def("cuda_kernels", &cuda::available, "Whether this build has kernels for CUDA devices.");
  module.def("cuda_encode", &encode, py::arg("codec"), py::arg("xs"), py::arg("codes"),
             py::arg("feedback") = std::vector<MaybeFeedback>(), py::arg("loss_scale") = 1.0F,
             py::arg("non_finite") = py::none(),
             "codes[i] (uint8) = encode(xs[i] (float32)); feedback[i]: (residual, residual, which of them counts) or\n"
             "None; non_finite (int32 [1]) becomes 1 where a block is not finite. Raises ValueError.");
  module.def("cuda_decode_set", &decode_set, py::arg("codec"), py::arg("outs"), py::arg("codes"),
             py::arg("non_finite") = py::none(), "outs[i] = decode(codes[i]). Raises ValueError.");
  module.def("cuda_reduce_codes", &reduce_codes, py::arg("codec"), py::arg("xs"), py::arg("sources"), py::arg("codes"),
             py::arg("own"), py::arg("divisor"), py::arg("feedback") = std::vector<MaybeFeedback>(),
             py::arg("loss_scale") = 1.0F, py::arg("non_finite") = py::none(),
             "codes[i] = encode((sum over ranks, in order, of decode(sources[i][rank]), xs[i] for `own`) / divisor);\n"
             "sources[i]: uint8 [ranks, bytes of a code or more]. Raises ValueError.");
  module.def("cuda_find_non_finite", &find_non_finite, py::arg("values"), py::arg("found"),
             "found (int32 [1]) becomes 1 where a value is infinite or NaN. Raises ValueError.");
  module.def("cuda_select", &select, py::arg("x"), py::arg("threshold"), py::arg("capacity"),
             "Elements with |x| >= threshold (and NaNs), in order: index (int32 [capacity]) and value (float32\n"
             "[capacity]) of as many as fit; selected (int32 [1]): how many there are. Raises ValueError.");
  module.def("cuda_commit", &commit, py::arg("which"), py::arg("non_finite") = py::none(),
             "which[i] = 1 - which[i] (int32 [1]), unless non_finite.");
}

}  // namespace ringdp
