// Products with thin matrices for Python, over tensors on the CPU, several matrices in a call. See codec/low_rank.h.
#include "codec/low_rank.h"

#include <pybind11/stl.h>

#include <optional>

#include "base/error.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/flat_tensors.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;
using MaybeTensors = std::vector<std::optional<at::Tensor>>;

[[noreturn]] void refuse_product(const std::string& why) {
  throw Error(ErrorKind::kValue, "a low-rank product: " + why);
}

void require_factor(const at::Tensor& factor, const std::string& name) {
  require_flat(factor, at::kFloat, name);
  if (factor.dim() != 2)
    refuse_product(name + " has " + std::to_string(factor.dim()) + " dimensions, not [rank, length]");
}

low_rank::Shape shape_of(const at::Tensor& left, const at::Tensor& right) {
  require_factor(left, "a left factor");
  require_factor(right, "a right factor");
  if (left.size(0) != right.size(0) || left.size(0) < 1)
    refuse_product("factors of rank " + std::to_string(left.size(0)) + " and " + std::to_string(right.size(0)));
  return {.rows = static_cast<std::size_t>(left.size(1)),
          .columns = static_cast<std::size_t>(right.size(1)),
          .rank = static_cast<std::size_t>(left.size(0))};
}

void require_matrix(const at::Tensor& matrix, const low_rank::Shape& shape, const std::string& name) {
  require_flat(matrix, at::kFloat, name);
  if (static_cast<std::size_t>(matrix.numel()) != shape.rows * shape.columns)
    refuse_product(name + " has " + std::to_string(matrix.numel()) + " elements, not " + std::to_string(shape.rows) +
                   " x " + std::to_string(shape.columns));
}

void require_as_many(std::size_t count, std::initializer_list<std::size_t> others) {
  for (const std::size_t other : others)
    if (other != count)
      refuse_product("lists of " + std::to_string(count) + " and " + std::to_string(other) + " tensors");
}

float* floats(const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }
const float* constants(const at::Tensor& tensor) { return tensor.const_data_ptr<float>(); }

void project(const Tensors& lefts, const Tensors& vs, const Tensors& xs, const MaybeTensors& residuals, float factor,
             const Tensors& rights) {
  require_as_many(lefts.size(), {vs.size(), xs.size(), residuals.size(), rights.size()});
  for (std::size_t i = 0; i < lefts.size(); ++i) {
    const low_rank::Shape shape = shape_of(lefts[i], rights[i]);
    require_matrix(xs[i], shape, "x");
    require_matrix(vs[i], shape, "v");
    if (residuals[i]) require_matrix(*residuals[i], shape, "the residual");
  }
  py::gil_scoped_release no_gil;
  for (std::size_t i = 0; i < lefts.size(); ++i)
    low_rank::project(floats(lefts[i]), floats(vs[i]), constants(xs[i]),
                      residuals[i] ? constants(*residuals[i]) : nullptr, factor, constants(rights[i]),
                      shape_of(lefts[i], rights[i]));
}

void project_back(const Tensors& rights, const Tensors& vs, const Tensors& lefts) {
  require_as_many(rights.size(), {vs.size(), lefts.size()});
  for (std::size_t i = 0; i < lefts.size(); ++i) require_matrix(vs[i], shape_of(lefts[i], rights[i]), "v");
  py::gil_scoped_release no_gil;
  for (std::size_t i = 0; i < lefts.size(); ++i)
    low_rank::project_back(floats(rights[i]), constants(vs[i]), constants(lefts[i]), shape_of(lefts[i], rights[i]));
}

void expand(const Tensors& matrices, const MaybeTensors& kept, float factor, const Tensors& lefts,
            const Tensors& rights) {
  require_as_many(matrices.size(), {kept.size(), lefts.size(), rights.size()});
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const low_rank::Shape shape = shape_of(lefts[i], rights[i]);
    require_matrix(matrices[i], shape, "the matrix");
    if (kept[i]) require_matrix(*kept[i], shape, "what is kept");
  }
  py::gil_scoped_release no_gil;
  for (std::size_t i = 0; i < matrices.size(); ++i)
    low_rank::expand(floats(matrices[i]), kept[i] ? floats(*kept[i]) : nullptr, factor, constants(lefts[i]),
                     constants(rights[i]), shape_of(lefts[i], rights[i]));
}

void orthonormalise(const Tensors& factors) {
  for (const at::Tensor& factor : factors) require_factor(factor, "a factor");
  py::gil_scoped_release no_gil;
  for (const at::Tensor& factor : factors)
    low_rank::orthonormalise(floats(factor), static_cast<std::size_t>(factor.size(1)),
                             static_cast<std::size_t>(factor.size(0)));
}

}  // namespace

void bind_low_rank(py::module_& module) {
  module.def("low_rank_project", &project, py::arg("lefts"), py::arg("vs"), py::arg("xs"), py::arg("residuals"),
             py::arg("factor"), py::arg("rights"),
             "v = x + factor * residual and left = (v rightᵀ)ᵀ of each matrix. Matrices: float32, [rows * columns];\n"
             "factors [rank, rows] and [rank, columns]; a residual may be None, and v may be x then.");
  module.def("low_rank_project_back", &project_back, py::arg("rights"), py::arg("vs"), py::arg("lefts"),
             "right = left v of each.");
  module.def("low_rank_expand", &expand, py::arg("matrices"), py::arg("kept"), py::arg("factor"), py::arg("lefts"),
             py::arg("rights"),
             "matrix = leftᵀ right of each; `kept`, v before, is (v - matrix) / factor then, where it is not None.");
  module.def("low_rank_orthonormalise", &orthonormalise, py::arg("factors"),
             "The vectors of each factor, in place, from the first to the last.");
}

}  // namespace ringdp
