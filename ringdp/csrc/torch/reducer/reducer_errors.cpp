#include "torch/reducer/reducer_errors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <stdexcept>

#include "base/error.h"
#include "python_errors.h"
#include "torch/reducer/forwards.h"

namespace ringdp {
namespace {

void set_int_field(PyObject* exception, const char* field, int64_t value) {
  if (exception == nullptr || value < 0) return;
  PyObject* number = PyLong_FromLongLong(value);
  if (number == nullptr || PyObject_SetAttrString(exception, field, number) != 0) PyErr_Clear();
  Py_XDECREF(number);
}

[[noreturn]] void throw_as_python(const Error& error, const std::string& where, const std::string& name, int64_t bucket,
                                  int64_t step) {
  pybind11::gil_scoped_acquire gil;
  ErrorContext context = error.context();
  if (context.name.empty()) context.name = name;
  const std::string text = error.what();
  const std::string why = error.kind() == ErrorKind::kMismatch ? Forwards::explain(text) : std::string();
  set_python_error(Error(error.kind(), text + where + why, context));
  python_error exception;
  exception.persist();
  set_int_field(exception.value, "bucket", bucket);
  set_int_field(exception.value, "step", step);
  throw exception;
}

// Adds the bucket to an exception that came through Python: ringdp's, if it has none yet, or another backend's.
void add_bucket_note(python_error& error, const std::string& where, const std::string& name, int64_t bucket,
                     int64_t step) {
  namespace py = pybind11;
  const py::gil_scoped_acquire gil;
  const py::handle exception(error.value);
  if (!exception || PyErr_GivenExceptionMatches(exception.ptr(), PyExc_RuntimeError) == 0) return;
  const bool ours = py::isinstance(exception, py::module_::import("ringdp.errors").attr("RingError"));
  if (ours && !exception.attr("bucket").is_none()) return;
  const std::string text = py::str(exception);
  exception.attr("args") = py::make_tuple(text + where + Forwards::explain(text));
  error.build_message();
  if (!ours) return;
  if (exception.attr("name").is_none()) exception.attr("name") = name;
  set_int_field(exception.ptr(), "bucket", bucket);
  set_int_field(exception.ptr(), "step", step);
}

}  // namespace

void rethrow_from_bucket(int64_t bucket, const std::string& name, int64_t step) {
  const std::string where = " (step " + std::to_string(step) + ", " + name + ")";
  try {
    throw;
  } catch (const Error& error) {
    throw_as_python(error, where, name, bucket, step);
  } catch (python_error& error) {
    add_bucket_note(error, where, name, bucket, step);
    throw;
  } catch (const pybind11::error_already_set&) {
    throw;
  } catch (c10::Error& error) {
    error.add_context("while reducing gradients" + where);
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + where);
  }
}

std::string current_error_text() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace ringdp
