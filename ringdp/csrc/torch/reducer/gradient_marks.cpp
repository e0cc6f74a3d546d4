#include "torch/reducer/gradient_marks.h"

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "torch/bindings/bindings.h"

namespace ringdp {

GradientMarks::GradientMarks(std::vector<at::Tensor> parameters)
    : parameters_(std::move(parameters)), marks_(parameters_.size()) {}

bool GradientMarks::fits(const Mark& mark, const at::Tensor& gradient) {
  return gradient.defined() && !gradient.is_inference() &&
         mark.gradient ==
             c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(gradient.getIntrusivePtr()) &&
         mark.version == gradient._version();
}

GradientMarks::Mark GradientMarks::mark_of(const at::Tensor& gradient, bool finite) {
  Mark mark;
  if (!gradient.defined() || gradient.is_inference()) return mark;
  mark.gradient = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(gradient.getIntrusivePtr());
  mark.version = static_cast<uint32_t>(gradient._version());
  mark.finite = finite;
  return mark;
}

void GradientMarks::note(bool finite) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    // A reduction writes into the bucket without torch: a gradient of the same tensor and version may be a new one.
    if (!finite || !fits(marks_[i], gradient)) marks_[i] = mark_of(gradient, finite);
  }
}

std::vector<bool> GradientMarks::finite() const {
  std::vector<bool> result(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    result[i] = marks_[i].finite && fits(marks_[i], parameters_[i].grad());
  return result;
}

void GradientMarks::renew(const std::vector<std::size_t>& parameters) {
  std::vector<Mark> marks(parameters_.size());
  for (std::size_t i : parameters) marks[i] = mark_of(parameters_.at(i).grad(), true);
  marks_ = std::move(marks);
}

void bind_gradient_marks(pybind11::module_& module) {
  pybind11::class_<GradientMarks>(module, "GradientMarks", "Which gradients are still what a backward left.")
      .def(pybind11::init<std::vector<at::Tensor>>(), pybind11::arg("parameters"))
      .def("note", &GradientMarks::note, pybind11::arg("finite"))
      .def("finite", &GradientMarks::finite)
      .def("renew", &GradientMarks::renew, pybind11::arg("parameters"));
}

}  // namespace ringdp
