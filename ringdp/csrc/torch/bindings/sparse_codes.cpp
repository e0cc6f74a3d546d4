// The sparse codes for Python, over tensors on the CPU. See codec/sparse.h.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "base/error.h"
#include "codec/sparse.h"
#include "codec/sparse2.h"
#include "codec/sparse_scan.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/flat_tensors.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using MaybeTensor = std::optional<at::Tensor>;

std::span<const std::byte> bytes_of(const at::Tensor& code) {
  require_flat(code, at::kByte, "a sparse code");
  return {static_cast<const std::byte*>(code.const_data_ptr()), static_cast<std::size_t>(code.numel())};
}

std::span<const std::byte> checked(const at::Tensor& code, std::size_t numel) {
  const auto bytes = bytes_of(code);
  sparse::check(bytes, numel);
  return bytes;
}

at::Tensor tensor_of(const sparse::Code& code) {
  at::Tensor out = at::empty(static_cast<int64_t>(code.size()), at::kByte);
  std::memcpy(out.mutable_data_ptr(), code.data(), code.size());
  return out;
}

std::size_t count_of(const at::Tensor& x, const MaybeTensor& residual, float factor) {
  require_flat(x, at::kFloat, "x");
  if (residual) require_flat(*residual, at::kFloat, "the residual");
  if (residual && residual->numel() != x.numel())
    throw Error(ErrorKind::kValue,
                "a residual of " + std::to_string(residual->numel()) + " elements for " + std::to_string(x.numel()));
  if (!(factor > 0)) throw Error(ErrorKind::kValue, "the factor must be positive, not " + std::to_string(factor));
  return static_cast<std::size_t>(x.numel());
}

const float* floats_or_null(const MaybeTensor& tensor) { return tensor ? tensor->const_data_ptr<float>() : nullptr; }

std::tuple<at::Tensor, MaybeTensor, std::size_t> sparse_select(const at::Tensor& x, const MaybeTensor& residual,
                                                               float factor, float threshold, std::size_t most,
                                                               MaybeTensor left, std::optional<std::size_t> equals) {
  const std::size_t count = count_of(x, residual, factor);
  if (left) require_flat(*left, at::kFloat, "the new residual");
  if (left && left->numel() != x.numel())
    throw Error(ErrorKind::kValue, "room for the residual of " + std::to_string(left->numel()) + " of " +
                                       std::to_string(x.numel()) + " elements leave");
  py::gil_scoped_release no_gil;
  if (!residual) left.reset();
  if (residual && !left) left = at::empty_like(*residual);
  const sparse::Selected it = sparse::select(x.const_data_ptr<float>(), floats_or_null(residual),
                                             left ? left->mutable_data_ptr<float>() : nullptr, factor, threshold, most,
                                             count, equals.value_or(SIZE_MAX));
  return {tensor_of(it.code), left, it.found};
}

float sparse_threshold(const at::Tensor& x, const MaybeTensor& residual, float factor, std::size_t wanted) {
  const sparse::Looked looked{x.const_data_ptr<float>(), floats_or_null(residual), factor,
                              count_of(x, residual, factor)};
  py::gil_scoped_release no_gil;
  return sparse::estimate_threshold(looked, wanted);
}

std::tuple<float, std::size_t> sparse_cut(const at::Tensor& x, const MaybeTensor& residual, float factor,
                                          std::size_t wanted) {
  const sparse::Looked looked{x.const_data_ptr<float>(), floats_or_null(residual), factor,
                              count_of(x, residual, factor)};
  if (wanted == 0 || wanted > looked.count)
    throw Error(ErrorKind::kValue, "the " + std::to_string(wanted) + " largest of " + std::to_string(looked.count));
  py::gil_scoped_release no_gil;
  const sparse::Cut found = sparse::exact_cut(looked, wanted);
  return {found.threshold, found.equals};
}

at::Tensor sparse_decode(const at::Tensor& code, std::size_t numel, const MaybeTensor& into) {
  const auto bytes = checked(code, numel);
  if (into) require_flat(*into, at::kFloat, "where to decode to");
  if (into && static_cast<std::size_t>(into->numel()) != numel)
    throw Error(ErrorKind::kValue,
                "room for " + std::to_string(into->numel()) + " of " + std::to_string(numel) + " elements");
  py::gil_scoped_release no_gil;
  at::Tensor out = into ? *into : at::empty(static_cast<int64_t>(numel), at::kFloat);
  sparse::decode_set(out.mutable_data_ptr<float>(), bytes, numel);
  return out;
}

at::Tensor sparse_merge(const std::vector<at::Tensor>& codes, std::size_t numel, float divisor, const MaybeTensor& lost,
                        float back) {
  std::vector<std::span<const std::byte>> views;
  for (const at::Tensor& code : codes) views.push_back(checked(code, numel));
  if (lost) require_flat(*lost, at::kFloat, "the residual");
  if (lost && static_cast<std::size_t>(lost->numel()) != numel)
    throw Error(ErrorKind::kValue, "room for the residual of " + std::to_string(lost->numel()) + " of " +
                                       std::to_string(numel) + " elements");
  py::gil_scoped_release no_gil;
  return tensor_of(sparse::merge(views, divisor, lost ? lost->mutable_data_ptr<float>() : nullptr, back, numel));
}

void require_kept(std::size_t kept) {
  if (kept == 0 || kept > sparse2::kChunk)
    throw Error(ErrorKind::kValue,
                std::to_string(kept) + " entries of a chunk; it must be 1 to " + std::to_string(sparse2::kChunk));
}

bool sparse2_encode(const at::Tensor& code, const at::Tensor& x, const MaybeTensor& residual,
                    const MaybeTensor& new_residual, float factor, float decay, std::size_t kept) {
  const std::size_t count = count_of(x, residual, factor);
  require_kept(kept);
  if (residual.has_value() != (new_residual && new_residual->numel() == x.numel()))
    throw Error(ErrorKind::kValue, "a residual and its new one, of as many elements as x, must both be given");
  if (new_residual) require_flat(*new_residual, at::kFloat, "the new residual");
  require_flat(code, at::kByte, "the code");
  if (static_cast<std::size_t>(code.numel()) != sparse2::encoded_bytes(count, kept))
    throw Error(ErrorKind::kValue, "room for " + std::to_string(code.numel()) + " bytes of a code of " +
                                       std::to_string(sparse2::encoded_bytes(count, kept)));
  py::gil_scoped_release no_gil;
  const sparse2::Input input{x.const_data_ptr<float>(), floats_or_null(residual),
                             new_residual ? new_residual->mutable_data_ptr<float>() : nullptr, factor, decay};
  return sparse2::encode(static_cast<std::byte*>(code.mutable_data_ptr()), input, count, kept) == Encoded::kFinite;
}

bool sparse2_add(const at::Tensor& sum, const at::Tensor& code, std::size_t kept, float weight) {
  require_flat(sum, at::kFloat, "the sum");
  require_kept(kept);
  const auto bytes = bytes_of(code);
  const auto count = static_cast<std::size_t>(sum.numel());
  py::gil_scoped_release no_gil;
  sparse2::check(bytes, count, kept);
  return sparse2::decode_add(sum.mutable_data_ptr<float>(), bytes.data(), weight, count, kept) == Encoded::kFinite;
}

}  // namespace

void bind_sparse_codes(py::module_& module) {
  module.def(
      "sparse_select", &sparse_select, py::arg("x"), py::arg("residual"), py::arg("factor"), py::arg("threshold"),
      py::arg("most"), py::arg("left") = py::none(), py::arg("equals") = py::none(),
      "(code, new residual, found) of v = x + factor * residual: the code has the first `most` elements of\n"
      "magnitude `threshold` or more, of those that equal it the first `equals`; `found` is how many there are.\n"
      "float32 [numel]; the residuals may be None. `left`: where to put the new one; may be the old one.");
  module.def("sparse_threshold", &sparse_threshold, py::arg("x"), py::arg("residual"), py::arg("factor"),
             py::arg("wanted"),
             "A magnitude that about `wanted` elements of x + factor * residual reach, by a sample; 0 where none is.");
  module.def("sparse_cut", &sparse_cut, py::arg("x"), py::arg("residual"), py::arg("factor"), py::arg("wanted"),
             "(threshold, equals): the `wanted` largest of x + factor * residual are those above the threshold and so\n"
             "many of those that equal it.");
  module.def("sparse_decode", &sparse_decode, py::arg("code"), py::arg("numel"), py::arg("out") = py::none(),
             "float32 [numel], in `out` if that is given. Raises ValueError for bytes that are not a code of "
             "so many\n"
             "elements, an index out of range.");
  module.def(
      "sparse_merge", &sparse_merge, py::arg("codes"), py::arg("numel"), py::arg("divisor"),
      py::arg("lost") = py::none(), py::arg("back") = 1.0F,
      "The code of the sum of what the codes hold, added in order, by `divisor`. What its rounding loses, times\n"
      "`back`, is added to `lost`, float32 [numel]. Raises ValueError as sparse_decode.");
  module.def(
      "sparse2_bytes",
      [](std::size_t numel, std::size_t kept) {
        require_kept(kept);
        return sparse2::encoded_bytes(numel, kept);
      },
      py::arg("numel"), py::arg("kept"), "Bytes of the sparse2 code of `numel` elements, `kept` of each 4,096.");
  module.def("sparse2_encode", &sparse2_encode, py::arg("code"), py::arg("x"), py::arg("residual"),
             py::arg("new_residual"), py::arg("factor"), py::arg("decay"), py::arg("kept"),
             "Write the sparse2 code of v = x + factor * decay * residual, and v - decode(code) by factor. Returns\n"
             "whether what it has is finite. float32 [numel]; both residuals may be None, or the same.");
  module.def(
      "sparse2_add", &sparse2_add, py::arg("sum"), py::arg("code"), py::arg("kept"), py::arg("weight") = 1.0F,
      "sum += weight * decode(code), in place, float32 [numel]. Returns whether the code's elements were finite.\n"
      "Raises ValueError for bytes that are not a code of so many elements.");
}

}  // namespace ringdp
