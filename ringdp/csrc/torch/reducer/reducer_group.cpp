#include "torch/reducer/reducer_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "python_errors.h"
#include "torch/backend/process_group.h"
#include "torch/backend/watchdog.h"
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
  const py::module_ errors = py::module_::import("ringdp.errors");
  const bool ours = py::isinstance(exception, errors.attr("RingError"));
  if (ours && !exception.attr("bucket").is_none()) return;
  const std::string before = py::str(exception);
  const std::string text = before + where + Forwards::explain(before);
  exception.attr("args") =
      py::make_tuple(ours ? errors.attr("with_story")(text, exception.attr("rank")) : py::str(text));
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

namespace {

constexpr std::chrono::seconds kNotifyTimeout{30};

}  // namespace

ReducerGroup::ReducerGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared,
                           bool host_control)
    : group_(std::move(group)),
      ranks_(group_->getSize()),
      average_(average),
      names_compared_(names_compared),
      host_control_(host_control) {
  if (const ProcessGroupRing* on_cpu = ring(c10::kCPU)) elastic_ = on_cpu->elastic();
}

bool ReducerGroup::replace(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared) {
  group_ = std::move(group);
  average_ = average;
  names_compared_ = names_compared;
  host_control_ = host_control_ && ring(c10::kCPU) != nullptr;
  const int before = std::exchange(ranks_, group_->getSize());
  return before != ranks_;
}

uint64_t ReducerGroup::view() const {
  const ProcessGroupRing* on_cpu = ring(c10::kCPU);
  return on_cpu != nullptr && on_cpu->elastic() != nullptr ? on_cpu->elastic()->view() : 0;
}

bool ReducerGroup::first_unit() const {
  const ProcessGroupRing* on_cpu = ring(c10::kCPU);
  return on_cpu != nullptr && on_cpu->elastic() != nullptr && on_cpu->elastic()->first_unit();
}

void ReducerGroup::follow_view() { ranks_ = group_->getSize(); }

uint64_t ReducerGroup::bytes_sent() const {
  const ProcessGroupRing* on_cpu = ring(c10::kCPU);
  if (on_cpu == nullptr) return 0;
  try {
    return on_cpu->group()->engine()->traffic().sent;
  } catch (const Error&) {  // the group has no members now
    return 0;
  }
}

ProcessGroupRing* ReducerGroup::ring(c10::DeviceType device) const { return ring_of(*group_, device); }

std::vector<std::vector<uint8_t>> ReducerGroup::gather(const std::vector<uint8_t>& mine, c10::Device device,
                                                       const std::string& name) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> sent{at::tensor(mine, at::kByte).to(device)};
  std::vector<std::vector<at::Tensor>> received(1);
  for (int rank = 0; rank < ranks_; ++rank) received[0].push_back(at::empty_like(sent[0]));
  {
    const NamedScope scope(name);
    wait(*group_->allgather(received, sent), device);
  }
  std::vector<std::vector<uint8_t>> result;
  for (const at::Tensor& bytes : received[0]) {
    const at::Tensor here = bytes.cpu().contiguous();
    const uint8_t* first = here.const_data_ptr<uint8_t>();
    result.emplace_back(first, first + here.numel());
  }
  return result;
}

std::vector<int32_t> ReducerGroup::broadcast(const std::vector<int32_t>& mine, c10::Device device,
                                             const std::string& name) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> tensors{at::tensor(mine, at::kInt).to(device)};
  {
    const NamedScope scope(name);
    wait(*group_->broadcast(tensors), device);
  }
  const at::Tensor here = tensors[0].cpu().contiguous();
  const int32_t* first = here.const_data_ptr<int32_t>();
  return {first, first + here.numel()};
}

void ReducerGroup::wait(c10d::Work& work, c10::Device device) const {
  if (const auto watchdog = watchdog_of(*group_, device.type())) watchdog->wait_for([&] { return work.getFuture(); });
  work.wait();
}

std::string ReducerGroup::notify_others(const std::string& what, c10::Device device) {
  if (!names_compared_ || ranks_ == 1) return {};
  try {
    const NamedScope scope(what);
    std::vector<at::Tensor> tensors{at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device))};
    c10d::AllreduceOptions options;
    options.timeout = kNotifyTimeout;
    wait(*group_->allreduce(tensors, options), device);
    return " The other ranks' backwards stopped at the same place, and none of them waits.";
  } catch (...) {
    return " The other ranks were notified, but are in another operation:\n" + current_error_text();
  }
}

}  // namespace ringdp
