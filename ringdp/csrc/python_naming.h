// Python's NamedScope: a name for the operations that a thread issues between `enter` and `exit` (`with
// ringdp.named("x"):`). Included by the two modules (core_module.cpp with pip's pybind11,
// torch/bindings/process_group_bindings.cpp with torch's).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "base/naming.h"

namespace ringdp {

// Holds a NamedScope between `enter` and `exit`, which the same thread calls; otherwise empty.
class PythonNamedScope {
 public:
  void enter(std::string name, bool bulk) { scope_ = std::make_unique<NamedScope>(std::move(name), bulk); }
  void exit() { scope_.reset(); }

 private:
  std::unique_ptr<NamedScope> scope_;
};

inline void bind_named_scope(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<PythonNamedScope>(module, "NamedScope", py::module_local(),
                               "A name for the operations of this thread, see ringdp.named.")
      .def(py::init<>())
      .def("enter", &PythonNamedScope::enter, py::arg("name"), py::arg("bulk") = false)
      .def("exit", &PythonNamedScope::exit);
}

}  // namespace ringdp
