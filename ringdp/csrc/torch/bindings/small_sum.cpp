// SmallSum for Python: a pushpull of one small key without an optimizer, with the least overhead over its all-reduce.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/naming.h"
#include "torch/backend/process_group.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/flat_tensors.h"

namespace ringdp {
namespace {

namespace py = pybind11;

// For one key with constant settings. Owned by Python; used by one thread at a time, on all ranks alike.
class SmallSum {
 public:
  struct Part {
    std::size_t of_slice;  // bytes from their starts
    std::size_t of_whole;
    std::size_t bytes;
  };

  // `slice`: this rank's part of the key, which is updated; `parts`: (offset in it, offset in the whole, count), in
  // elements.
  SmallSum(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<int64_t> shape, at::Tensor slice,
           const std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>& parts, bool average, std::string name)
      : group_(std::move(group)), shape_(std::move(shape)), slice_(std::move(slice)), name_(std::move(name)) {
    if (ring_of(*group_, c10::kCPU) == nullptr)
      throw Error(ErrorKind::kState, "ring is not the group's backend for CPU tensors");
    require_flat(slice_, slice_.scalar_type(), "a slice");
    const std::size_t each = slice_.element_size();
    for (const auto& [of_slice, of_whole, count] : parts)
      parts_.push_back({of_slice * each, of_whole * each, count * each});
    options_.reduceOp = average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    options_.asyncOp = false;
  }

  // The sum of all ranks' values, into `out`, or into `value` if that is None. Does nothing and returns False if one
  // of them is not a plain tensor of the key's shape and type, contiguous and on the CPU.
  bool run(const py::object& value, const py::object& out) {
    if (!takes(value) || !(out.is_none() || takes(out))) return false;
    const at::Tensor from = THPVariable_Unpack(value.ptr());
    std::vector<at::Tensor> to{out.is_none() ? from : THPVariable_Unpack(out.ptr())};
    const py::gil_scoped_release no_gil;
    if (!to[0].is_inference()) to[0].unsafeGetTensorImpl()->bump_version();
    auto* whole = static_cast<std::byte*>(to[0].mutable_data_ptr());
    if (const void* source = from.const_data_ptr(); source != whole) std::memmove(whole, source, from.nbytes());
    {
      const NamedScope named(name_);
      ring_of(*group_, c10::kCPU)->allreduce(to, options_);
    }
    auto* slice = static_cast<std::byte*>(slice_.mutable_data_ptr());
    for (const Part& part : parts_) std::memcpy(slice + part.of_slice, whole + part.of_whole, part.bytes);
    return true;
  }

 private:
  bool takes(const py::object& object) const {
    // torch.Tensor itself: not a Parameter or another subclass.
    if (Py_TYPE(object.ptr()) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    return tensor.scalar_type() == slice_.scalar_type() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
           tensor.sizes() == at::IntArrayRef(shape_) && tensor.is_contiguous() && !tensor.requires_grad() &&
           !tensor.is_conj() && !tensor.is_neg();
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::vector<int64_t> shape_;
  const at::Tensor slice_;
  const std::string name_;
  std::vector<Part> parts_;
  c10d::AllreduceOptions options_;
};

}  // namespace

void bind_small_sum(py::module_& module) {
  py::class_<SmallSum>(module, "SmallSum", "A pushpull of one small key without an optimizer, over ring.")
      .def(py::init<c10::intrusive_ptr<c10d::ProcessGroup>, std::vector<int64_t>, at::Tensor,
                    const std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>&, bool, std::string>(),
           py::kw_only(), py::arg("group"), py::arg("shape"), py::arg("slice"), py::arg("parts"), py::arg("average"),
           py::arg("name"))
      .def("__call__", &SmallSum::run, py::arg("value"), py::arg("out").none(true),
           "Put the sum of all ranks' values into `out`, or into `value`; False where a tensor needs preparation: then "
           "nothing was done.");
}

}  // namespace ringdp
