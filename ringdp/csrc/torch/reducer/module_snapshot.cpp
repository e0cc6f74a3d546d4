#include "torch/reducer/module_snapshot.h"

#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>

#include "torch/bindings/bindings.h"

namespace ringdp {
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

}  // namespace ringdp
