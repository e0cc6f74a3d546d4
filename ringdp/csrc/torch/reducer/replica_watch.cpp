#include "torch/reducer/replica_watch.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "kernels/hash64.h"
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

namespace {

namespace py = pybind11;
using Places = std::vector<const void*>;

constexpr std::size_t kPlacesPerModule = 4;  // at least, except for a module without parameters

// Calls `visit(name, value)` for the items of the module's `attribute`: a dict, or its equivalent in a ScriptModule.
template <typename Visit>
void for_each_of(PyObject* module, PyObject* attribute, Visit visit) {
  PyObject** own = _PyObject_GetDictPtr(module);
  PyObject* kept = own != nullptr && *own != nullptr ? PyDict_GetItemWithError(*own, attribute) : nullptr;
  if (kept != nullptr && PyDict_Check(kept)) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(kept, &position, &name, &value) != 0;) visit(name, value);
    return;
  }
  PyErr_Clear();
  const auto mapping = py::reinterpret_steal<py::object>(PyObject_GetAttr(module, attribute));
  if (!mapping) throw py::error_already_set();
  for (const py::handle item : mapping.attr("items")()) {
    const py::tuple pair = py::reinterpret_borrow<py::tuple>(item);
    visit(nullptr, pair[1].ptr());  // the name is a new object at each call
  }
}

struct Walk {
  py::str parameters{"_parameters"}, buffers{"_buffers"}, modules{"_modules"};
  std::unordered_set<PyObject*> seen;
  Places places;

  void visit(PyObject* module) {
    places.push_back(module);
    if (!seen.insert(module).second) return;
    for_each_of(module, parameters.ptr(), [&](PyObject* name, PyObject* value) {
      places.push_back(name);
      places.push_back(THPVariable_Check(value) ? THPVariable_Unpack(value).unsafeGetTensorImpl() : nullptr);
    });
    // Buffers may be replaced in every forward; torch lists them anew each time it sends them.
    for_each_of(module, buffers.ptr(), [&](PyObject* name, PyObject*) { places.push_back(name); });
    for_each_of(module, modules.ptr(), [&](PyObject* name, PyObject* child) {
      places.push_back(name);
      if (child != Py_None) visit(child);
    });
    places.push_back(nullptr);
  }
};

}  // namespace

ModuleSnapshot::Places ModuleSnapshot::walk(const py::object& module, std::size_t expected) {
  Walk walk;
  walk.places.reserve(expected);
  walk.seen.reserve(expected / kPlacesPerModule);
  walk.visit(module.ptr());
  return std::move(walk.places);
}

void bind_module_snapshot(py::module_& module) {
  py::class_<ModuleSnapshot>(module, "ModuleSnapshot", "Which parameters a module has where, to be compared later.")
      .def(py::init<const py::object&>(), py::arg("module"))
      .def("differs", &ModuleSnapshot::differs, py::arg("module"));
}

namespace {

namespace py = pybind11;

constexpr uint64_t kPlaceMultiplier = 0xBF58476D1CE4E5B9ULL;

// The bytes in memory order, if there are no gaps or repetitions: ranks have equal strides.
uint64_t hash_of(const at::Tensor& tensor, std::size_t begin, std::size_t end, uint64_t seed) {
  const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  const auto* first = static_cast<const std::byte*>(dense.const_data_ptr());
  return hash64(std::span(first + begin, end - begin), seed);
}

uint64_t seed_of(std::size_t tensor, std::size_t begin) {
  return (static_cast<uint64_t>(tensor) + 1) * kPlaceMultiplier + begin;
}

}  // namespace

ReplicaHash::ReplicaHash(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].is_cpu() && tensors_[i].layout() == at::kStrided) continue;
    throw Error(ErrorKind::kValue, "tensor " + std::to_string(i) + " is " + c10::str(tensors_[i].layout()) + " on " +
                                       c10::str(tensors_[i].device()) + "; it must be strided, on the CPU");
  }
  for (const at::Tensor& it : tensors_) ends_.push_back(bytes() + it.nbytes());
}

template <class Visit>
void ReplicaHash::for_pieces(std::size_t part, std::size_t parts, Visit visit) const {
  const std::size_t total = bytes();
  const std::size_t first = total / parts * part + std::min(part, total % parts);
  const std::size_t last = first + total / parts + (part < total % parts ? 1 : 0);
  auto i = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
  for (; i < tensors_.size(); ++i) {
    const std::size_t offset = i == 0 ? 0 : ends_[i - 1];
    if (offset >= last) return;
    const std::size_t begin = std::max(first, offset), end = std::min(last, ends_[i]);
    if (begin < end) visit(i, begin - offset, end - offset);
  }
}

uint64_t ReplicaHash::part(std::size_t part, std::size_t parts) const {
  uint64_t sum = 0;
  for_pieces(part, parts, [&](std::size_t i, std::size_t begin, std::size_t end) {
    sum += hash_of(tensors_[i], begin, end, seed_of(i, begin));
  });
  return sum;
}

std::pair<std::size_t, std::size_t> ReplicaHash::tensors_in(std::size_t part, std::size_t parts) const {
  std::pair<std::size_t, std::size_t> range{tensors_.size(), 0};
  for_pieces(part, parts, [&](std::size_t i, std::size_t, std::size_t) {
    range.first = std::min(range.first, i);
    range.second = i + 1;
  });
  range.first = std::min(range.first, range.second);
  return range;
}

std::vector<uint64_t> ReplicaHash::each() const {
  std::vector<uint64_t> out;
  for (const at::Tensor& it : tensors_) out.push_back(hash_of(it, 0, it.nbytes(), 0));
  return out;
}

void bind_replica_hash(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ReplicaHash>(module, "ReplicaHash", "64-bit hashes of tensors that all ranks should have alike.")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("tensors"))
      .def("part", &ReplicaHash::part, py::arg("part"), py::arg("parts"), NoGil(),
           "Of the bytes of all tensors, one after the other: of the `part`-th of `parts` about equal ones.")
      .def("tensors_in", &ReplicaHash::tensors_in, py::arg("part"), py::arg("parts"), NoGil(),
           "The tensors with bytes in that part: the index of the first, and one past the last.")
      .def("each", &ReplicaHash::each, NoGil(), "Of each tensor.")
      .def_property_readonly("bytes", &ReplicaHash::bytes);
}

}  // namespace ringdp
