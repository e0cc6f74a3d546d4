// ringdp._C.CodecReduction, PythonReduction: see torch/reducer/plan.h.
#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include <memory>
#include <utility>

#include "torch/bindings/bindings.h"
#include "torch/reducer/plan.h"

namespace ringdp {
namespace {

namespace py = pybind11;

class PythonReduction final : public HookReduction {
 public:
  PythonReduction(std::string name, py::object state, py::object hook)
      : HookReduction(std::move(name)), hook_(state, std::move(hook)), state_(std::move(state)) {}
  ~PythonReduction() override {
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

std::shared_ptr<CodecReduction> make_native(const std::string& codec, bool feedback) {
  return std::make_shared<CodecReduction>(codec_by_name(codec), feedback);
}

std::shared_ptr<PythonReduction> make_python(py::object state, py::object hook, std::string name) {
  return std::make_shared<PythonReduction>(std::move(name), std::move(state), std::move(hook));
}

}  // namespace

void bind_reductions(py::module_& module) {
  py::class_<Reduction, std::shared_ptr<Reduction>>(module, "Reduction",
                                                    "How the gradients of some parameters are reduced.")
      .def_property("enabled", &Reduction::enabled, &Reduction::set_enabled)
      .def_property_readonly("name", &Reduction::name);
  py::class_<CodecReduction, Reduction, std::shared_ptr<CodecReduction>>(module, "CodecReduction",
                                                                         "By one of the core's codecs.")
      .def(py::init(&make_native), py::arg("codec"), py::arg("feedback") = false)
      .def_property_readonly("feedback", &CodecReduction::feedback);
  py::class_<AutoReduction, Reduction, std::shared_ptr<AutoReduction>>(
      module, "AutoReduction",
      "Exactly, or by the reduction that Reducer.choose gave the bucket; `feedback`: some of those keep residuals.")
      .def(py::init<bool>(), py::arg("feedback"))
      .def_property_readonly("feedback", &AutoReduction::feedback);
  py::class_<PythonReduction, Reduction, std::shared_ptr<PythonReduction>>(
      module, "PythonReduction",
      "By a communication hook, hook(state, bucket) -> Future. Its state may have `finite` (a bool, or a method that\n"
      "returns one), commit(finite, unused=names), and `divisor`, which is set to the number of ranks with input.")
      .def(py::init(&make_python), py::arg("state"), py::arg("hook"), py::arg("name") = "hook");
}

}  // namespace ringdp
