// The one place where exceptions leave C++: ringdp::Error becomes its class in ringdp/errors.py.
// Included by the two module files (core_module.cpp with pip's pybind11, torch/bindings.cpp with torch's), GIL held.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"

namespace ringdp {

// `made`: the steps of this process, which may be part of the explanation; -1: not known.
inline void set_python_error(const Error& error, int64_t made = -1) {
  namespace py = pybind11;
  if (error.kind() == ErrorKind::kInterrupted && PyErr_Occurred() != nullptr)
    return;  // the signal handler's own exception
  const ErrorContext& context = error.context();
  py::dict fields;
  auto put_int = [&](const char* key, int64_t value) {
    if (value >= 0) fields[key] = value;
  };
  auto put_text = [&](const char* key, const std::string& value) {
    if (!value.empty()) fields[key] = value;
  };
  put_int("rank", context.rank);
  put_text("host", context.host);
  put_int("peer", context.peer);
  put_text("peer_host", context.peer_host);
  put_int("peer_pid", context.peer_pid);
  put_text("operation", context.operation);
  put_int("sequence", context.sequence);
  put_text("name", context.name);
  put_text("cause", context.cause);
  put_text("advice", context.advice);
  put_int("view", context.view);
  if (!context.survivors.empty()) fields["survivors"] = py::cast(context.survivors);
  py::object value = py::module_::import("ringdp.errors")
                         .attr("from_core")(error_class_name(error.kind()), error.what(), made, **fields);
  PyErr_SetObject(py::type::handle_of(value).ptr(), value.ptr());
}

// Returns -1: a module without steps.
inline int64_t no_steps() { return -1; }

template <int64_t (*steps_made)() = no_steps>
void register_error_translator() {
  pybind11::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      set_python_error(error, steps_made());
    }
  });
}

}  // namespace ringdp
