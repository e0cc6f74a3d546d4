// ringdp._C.NativeMethod, PythonMethod: see torch/method.h.
#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include <memory>
#include <utility>

#include "torch/bindings.h"
#include "torch/method.h"

namespace ringdp {
namespace {

namespace py = pybind11;

class PythonMethod final : public HookMethod {
 public:
  PythonMethod(std::string name, py::object state, py::object hook)
      : HookMethod(std::move(name)), hook_(state, std::move(hook)), state_(std::move(state)) {}
  ~PythonMethod() override {
    py::gil_scoped_acquire gil;
    state_ = py::object();
  }

  c10d::CommHookInterface& hook() override { return hook_; }

  std::optional<bool> finite() override {
    py::gil_scoped_acquire gil;
    if (!py::hasattr(state_, "finite")) return std::nullopt;
    const py::object says = state_.attr("finite");
    return (PyCallable_Check(says.ptr()) != 0 ? says() : says).cast<std::optional<bool>>();
  }

  void commit(bool finite, const std::vector<std::string>& unused) override {
    py::gil_scoped_acquire gil;
    if (py::hasattr(state_, "commit")) state_.attr("commit")(finite, py::arg("unused") = unused);
  }

  void set_divisor(int64_t divisor) override {
    py::gil_scoped_acquire gil;
    if (!py::hasattr(state_, "divisor")) return;
    py::setattr(state_, "divisor", divisor == 0 ? py::object(py::none()) : py::object(py::int_(divisor)));
  }

 private:
  c10d::PythonCommHook hook_;
  py::object state_;
};

std::shared_ptr<NativeMethod> make_native(const std::string& codec, bool feedback) {
  return std::make_shared<NativeMethod>(codec_by_name(codec), feedback);
}

std::shared_ptr<PythonMethod> make_python(py::object state, py::object hook, std::string name) {
  return std::make_shared<PythonMethod>(std::move(name), std::move(state), std::move(hook));
}

}  // namespace

void bind_methods(py::module_& module) {
  py::class_<Method, std::shared_ptr<Method>>(module, "Method", "How the gradients of some parameters are reduced.")
      .def_property("enabled", &Method::enabled, &Method::set_enabled)
      .def_property_readonly("name", &Method::name);
  py::class_<NativeMethod, Method, std::shared_ptr<NativeMethod>>(module, "NativeMethod",
                                                                  "By one of the core's codecs.")
      .def(py::init(&make_native), py::arg("codec"), py::arg("feedback") = false)
      .def_property_readonly("feedback", &NativeMethod::feedback);
  py::class_<ChosenMethod, Method, std::shared_ptr<ChosenMethod>>(
      module, "ChosenMethod", "Exactly, or by what Reducer.choose gave the bucket; `feedback`: some of that owes.")
      .def(py::init<bool>(), py::arg("feedback"))
      .def_property_readonly("feedback", &ChosenMethod::feedback);
  py::class_<PythonMethod, Method, std::shared_ptr<PythonMethod>>(
      module, "PythonMethod",
      "By a communication hook, hook(state, bucket) -> Future. Its state may have `finite` (a bool, or a method that\n"
      "returns one), commit(finite, unused=names), and `divisor`, which is set to the number of ranks with input.")
      .def(py::init(&make_python), py::arg("state"), py::arg("hook"), py::arg("name") = "hook");
}

}  // namespace ringdp
