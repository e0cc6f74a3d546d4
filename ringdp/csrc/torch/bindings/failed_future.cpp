// A torch.futures.Future that fails with a Python exception, and is waited for in C++: whoever waits raises that very
// object, in backward() too. (Future.set_exception is Python's alone; Future.then makes a RuntimeError of its text.)
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <exception>
#include <memory>
#include <utility>

#include "torch/bindings.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using torch::jit::PythonFutureWrapper;

// It can be thrown more than once, on any thread, and is given back under the GIL.
std::exception_ptr kept(const py::object& exception) {
  python_error error;
  error.type = py::type::of(exception).release().ptr();
  error.value = py::object(exception).release().ptr();
  error.traceback = PyException_GetTraceback(exception.ptr());
  error.build_message();
  return std::make_exception_ptr(std::move(error));
}

void fail_future(const std::shared_ptr<PythonFutureWrapper>& future, const py::object& exception) {
  std::exception_ptr error = kept(exception);
  const py::gil_scoped_release without_gil;
  future->fut->setError(std::move(error));
}

}  // namespace

void bind_failed_future(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(std::move(pointer));
    } catch (python_error& error) {
      error.restore();
    }
  });
  module.def("fail_future", &fail_future, py::arg("future"), py::arg("exception"),
             "Complete the future with the exception, which whoever waits for it raises, C++ too.");
}

}  // namespace ringdp
