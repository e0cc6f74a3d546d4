// RingWork for Python: a Work whose future stores the path of its operation, so that collectives issued in its
// callbacks are matched on all ranks, whether a callback runs at once (attached to a complete future) or later on a
// completion thread. (torch's own future cannot be derived from.)
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "base/bytes.h"
#include "torch/backend/work.h"
#include "torch/bindings/bindings.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using torch::jit::PythonFutureWrapper;

// For Future::setError: it can be thrown repeatedly, on any thread. GIL held; its destructor takes the GIL.
std::exception_ptr kept_error(const py::object& exception) {
  python_error error;
  error.type = py::type::of(exception).release().ptr();
  error.value = py::object(exception).release().ptr();
  error.traceback = PyException_GetTraceback(exception.ptr());
  error.build_message();
  return std::make_exception_ptr(std::move(error));
}

// A torch.futures.Future that fails with a Python exception, which waits in C++ raise too, as in backward(): the same
// object. (Future.set_exception works in Python alone; Future.then makes a RuntimeError of its text.)
void fail_future(const std::shared_ptr<PythonFutureWrapper>& future, const py::object& exception) {
  std::exception_ptr error = kept_error(exception);
  const py::gil_scoped_release without_gil;
  future->fut->setError(std::move(error));
}

// With a second enable_shared_from_this pybind11 ignores the first, from which it cannot cast down (no virtual
// function).
struct NoSharedFromThis : std::enable_shared_from_this<NoSharedFromThis> {};

// torch.futures.Future, but callbacks run in a CallbackScope. The n-th callback's path is made of its future's path
// and n.
class RingFuture : public PythonFutureWrapper, public NoSharedFromThis {
 public:
  using Attach = std::function<uint64_t()>;  // returns the number of earlier callbacks

  static std::shared_ptr<RingFuture> make(c10::intrusive_ptr<c10::ivalue::Future> future, uint64_t path, int lane,
                                          Attach attach) {
    auto* made = new RingFuture(std::move(future), path, lane, std::move(attach));
    // Through a pointer to the base, which sets its weak_ptr, as `then` needs it.
    std::shared_ptr<PythonFutureWrapper> owner(static_cast<PythonFutureWrapper*>(made),
                                               [](PythonFutureWrapper* it) { delete static_cast<RingFuture*>(it); });
    return std::shared_ptr<RingFuture>(owner, made);
  }

  // torch's own converts every exception of the callback to a RuntimeError with its text. Here a RuntimeError
  // (ringdp's are) and exceptions that end a program are kept.
  std::shared_ptr<RingFuture> then_in_scope(py::function callback) {
    const uint64_t path = next_path();
    auto scoped = std::make_shared<torch::jit::PythonFunctionGuard>(in_scope(std::move(callback), path));
    auto self = PythonFutureWrapper::shared_from_this();
    auto following = fut->then(
        [self = std::move(self), scoped = std::move(scoped)](c10::ivalue::Future&) -> c10::IValue {
          const py::gil_scoped_acquire gil;
          try {
            return torch::jit::toIValue(scoped->func_(self), c10::PyObjectType::get());
          } catch (py::error_already_set& error) {
            const py::object value = error.value();
            if (error.matches(PyExc_Exception) && !error.matches(PyExc_RuntimeError))
              throw std::runtime_error(std::string("Got the following error when running the callback: ") +
                                       error.what());
            if (error.trace()) PyException_SetTraceback(value.ptr(), error.trace().ptr());
            std::rethrow_exception(kept_error(value));
          }
        },
        c10::PyObjectType::get());
    auto attached = std::make_shared<std::atomic<uint64_t>>(0);
    return make(std::move(following), path, lane_, [attached] { return attached->fetch_add(1); });
  }

  void add_in_scope(py::function callback) {
    const uint64_t path = next_path();
    add_done_callback(in_scope(std::move(callback), path));
  }

 private:
  RingFuture(c10::intrusive_ptr<c10::ivalue::Future> future, uint64_t path, int lane, Attach attach)
      : PythonFutureWrapper(std::move(future)), path_(path), lane_(lane), attach_(std::move(attach)) {}

  uint64_t next_path() { return hash_mix(path_, ~attach_()); }  // ~: not the number of an operation issued on this path

  py::function in_scope(py::function callback, uint64_t path) const {
    return py::cpp_function([callback = std::move(callback), path, lane = lane_](const py::object& future) {
      const CallbackScope scope(path, lane);
      return callback(future);
    });
  }

  const uint64_t path_;
  const int lane_;
  const Attach attach_;
};

// Between enter and exit get_future waits for the operation, on this thread alone: a callback then runs when it is
// attached, and an operation that it issues belongs to the unit in which this thread is. One thread.
class CompleteFutures {
 public:
  void enter() { ++depth_; }
  void exit() { --depth_; }
  static bool here() { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

std::shared_ptr<RingFuture> future_of(const c10::intrusive_ptr<RingWork>& work) {
  if (CompleteFutures::here()) {
    const py::gil_scoped_release no_gil;
    work->wait(kNoTimeout);
  }
  return RingFuture::make(work->getFuture(), work->callback_path(), work->lane(),
                          [work] { return work->attach_callback(); });
}

}  // namespace

void bind_work(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(std::move(pointer));
    } catch (python_error& error) {
      error.restore();
    }
  });
  module.def("fail_future", &fail_future, py::arg("future"), py::arg("exception"),
             "Complete the future with the exception, which is raised where the future is waited for, in C++ too.");
  py::class_<RingFuture, PythonFutureWrapper, std::shared_ptr<RingFuture>>(module, "RingFuture")
      .def("then", &RingFuture::then_in_scope, py::arg("callback"))
      .def("add_done_callback", &RingFuture::add_in_scope, py::arg("callback"));
  py::class_<RingWork, c10d::Work, c10::intrusive_ptr<RingWork>>(module, "RingWork").def("get_future", &future_of);
  py::class_<CompleteFutures>(module, "CompleteFutures", "In its block futures of operations are complete.")
      .def(py::init<>())
      .def("__enter__", &CompleteFutures::enter)
      .def("__exit__", [](CompleteFutures& it, const py::object&, const py::object&, const py::object&) { it.exit(); });
}

}  // namespace ringdp
