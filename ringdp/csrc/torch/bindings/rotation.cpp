// The rotation of blocks for Python, over tensors on the CPU. See codec/rotation.h.
#include "codec/rotation.h"

#include <ATen/ops/empty_like.h>

#include "base/error.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/flat_tensors.h"

namespace ringdp {
namespace {

namespace py = pybind11;

at::Tensor rotate(const at::Tensor& x, const at::Tensor& signs, bool back) {
  require_flat(x, at::kFloat, "x");
  require_flat(signs, at::kByte, "signs");
  constexpr std::size_t kBytes = rotation::kBlock / 8;
  if (static_cast<std::size_t>(signs.numel()) != kBytes)
    throw Error(ErrorKind::kValue, std::to_string(signs.numel()) + " bytes of signs, not " + std::to_string(kBytes));
  py::gil_scoped_release no_gil;
  at::Tensor out = at::empty_like(x);
  const rotation::Signs bits(signs.const_data_ptr<uint8_t>(), kBytes);
  const auto turn = back ? rotation::rotate_back : rotation::rotate;
  turn(out.mutable_data_ptr<float>(), x.const_data_ptr<float>(), static_cast<std::size_t>(x.numel()), bits);
  return out;
}

}  // namespace

void bind_rotation(py::module_& module) {
  module.def(
      "rotate", &rotate, py::arg("x"), py::arg("signs"), py::arg("back") = false,
      "Blocks of 256 floats times a Hadamard matrix with random signs (uint8 [32], a bit for each element), or back.");
}

}  // namespace ringdp
