// A torch.futures.Future that fails with a Python exception, which waits in C++ raise too, as in backward(): the same
// object. (Future.set_exception works in Python alone; Future.then makes a RuntimeError of its text.)
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <exception>
#include <memory>
#include <utility>

#include "torch/bindings/bindings.h"
#include "torch/bindings/kept_error.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using torch::jit::PythonFutureWrapper;

void fail_future(const std::shared_ptr<PythonFutureWrapper>& future, const py::object& exception) {
  std::exception_ptr error = kept_error(exception);
  const py::gil_scoped_release without_gil;
  future->fut->setError(std::move(error));
}

}  // namespace

std::exception_ptr kept_error(const py::object& exception) {
  python_error error;
  error.type = py::type::of(exception).release().ptr();
  error.value = py::object(exception).release().ptr();
  error.traceback = PyException_GetTraceback(exception.ptr());
  error.build_message();
  return std::make_exception_ptr(std::move(error));
}

void bind_failed_future(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(std::move(pointer));
    } catch (python_error& error) {
      error.restore();
    }
  });
  module.def("fail_future", &fail_future, py::arg("future"), py::arg("exception"),
             "Complete the future with the exception, which is raised where the future is waited for, in C++ too.");
}

}  // namespace ringdp
