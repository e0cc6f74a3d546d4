// Mailbox for Python, and what its payloads are made of. Calls that move bytes release the GIL.
#include "engine/mailbox.h"

#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kernels/kernels.h"
#include "torch/backend/buffers.h"
#include "torch/backend/process_group.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/flat_tensors.h"
#include "torch/bindings/without_python_lock.h"

namespace ringdp {
namespace {

namespace py = pybind11;

// Destroyed without the GIL: closing waits for the thread that drives.
class Handle {
 public:
  Handle(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name, std::size_t most_bytes) {
    const py::gil_scoped_release no_gil;
    const ProcessGroupRing* ring = ring_of(*group, c10::kCPU);
    if (ring == nullptr) throw Error(ErrorKind::kState, "ring is not the group's backend for CPU tensors");
    box_ = Mailbox::make(*ring->group(), name, most_bytes);
  }
  ~Handle() {
    const WithoutPythonLock no_lock;
    box_.reset();
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  Mailbox& box() { return *box_; }

 private:
  std::shared_ptr<Mailbox> box_;
};

using Received = std::tuple<bool, int, std::optional<py::bytes>, std::optional<at::Tensor>>;

std::shared_ptr<std::byte> memory_of(at::Tensor tensor) {
  auto* data = static_cast<std::byte*>(tensor.data_ptr());
  return {data, [kept = std::move(tensor)](std::byte*) mutable { kept.reset(); }};
}

at::Tensor tensor_of(const std::shared_ptr<std::byte>& memory, std::size_t bytes) {
  return at::from_blob(memory.get(), {static_cast<int64_t>(bytes)}, [memory](void*) {}, at::kByte);
}

std::optional<Received> received(std::optional<Mailbox::Message> message) {
  if (!message) return std::nullopt;
  const bool asks = message->box == Mailbox::kRequests;
  if (message->lost) return Received{asks, message->from, std::nullopt, std::nullopt};
  std::optional<at::Tensor> payload;
  if (message->bytes > 0) payload = tensor_of(message->payload, message->bytes);
  return Received{asks, message->from, py::bytes(message->header), std::move(payload)};
}

std::optional<Received> request(Handle& handle, int64_t timeout_ms) {
  std::optional<Mailbox::Message> message;
  {
    const py::gil_scoped_release no_gil;
    message = handle.box().request(timeout_ms);
  }
  return received(std::move(message));
}

std::optional<Received> answer(Handle& handle, int from, int64_t timeout_ms, bool serves) {
  std::optional<Mailbox::Message> message;
  {
    const py::gil_scoped_release no_gil;
    message = handle.box().answer(from, timeout_ms, serves);
  }
  return received(std::move(message));
}

void land(Handle& handle, int from, at::Tensor memory) {
  require_flat(memory, at::kByte, "memory for an answer");
  const auto bytes = memory.nbytes();
  const py::gil_scoped_release no_gil;
  handle.box().land(from, memory_of(std::move(memory)), bytes);
}

int64_t send(Handle& handle, int to, const py::bytes& header, std::optional<at::Tensor> payload, bool answers,
             bool waits) {
  const std::string text = header;
  std::span<std::byte> bytes;
  std::shared_ptr<std::byte> memory;
  if (payload) {
    if (!payload->is_cpu() || !payload->is_contiguous())
      throw Error(ErrorKind::kValue, "a payload has to be contiguous, on the CPU");
    bytes = {static_cast<std::byte*>(payload->data_ptr()), payload->nbytes()};
    memory = memory_of(std::move(*payload));
    payload.reset();
  }
  const py::gil_scoped_release no_gil;
  return handle.box().send(to, answers ? Mailbox::kAnswers : Mailbox::kRequests, text, bytes, std::move(memory), waits);
}

// Parcel: how parts of several flat tensors lie in the payload of a message, behind a head that says which they are.
class Parcel {
 public:
  using Span = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>;  // tensor, its first byte, bytes, place

  Parcel(std::string head, std::vector<Span> spans, std::size_t total)
      : head_(std::move(head)), spans_(std::move(spans)), total_(total) {
    for (const auto& [tensor, first, bytes, at] : spans_)
      if (at + bytes > total_) throw Error(ErrorKind::kValue, "a part lies behind the end of its parcel");
  }

  at::Tensor pack(const std::vector<at::Tensor>& tensors) const {
    const std::size_t all = head_.size() + total_;
    at::Tensor body = tensor_of(pool_->take(std::max<std::size_t>(all, 1)), all);
    const py::gil_scoped_release no_gil;
    auto* to = static_cast<std::byte*>(body.data_ptr());
    std::memcpy(to, head_.data(), head_.size());
    std::size_t filled = 0;
    for (const auto& [tensor, first, bytes, at] : spans_) {
      std::memset(to + head_.size() + filled, 0, at - filled);  // what lies between parts
      std::memcpy(to + head_.size() + at, memory(tensors, tensor, first, bytes), bytes);
      filled = at + bytes;
    }
    std::memset(to + head_.size() + filled, 0, total_ - filled);
    return body;
  }

  void unpack(const at::Tensor& body, const std::vector<at::Tensor>& tensors) const {
    require_flat(body, at::kByte, "a payload");
    if (body.nbytes() < total_) throw Error(ErrorKind::kValue, "a payload is shorter than its parcel");
    const py::gil_scoped_release no_gil;
    const auto* from = static_cast<const std::byte*>(body.const_data_ptr()) + body.nbytes() - total_;
    for (const auto& [tensor, first, bytes, at] : spans_) {
      std::byte* to = memory(tensors, tensor, first, bytes);
      if (to != from + at) std::memcpy(to, from + at, bytes);
    }
  }

 private:
  static std::byte* memory(const std::vector<at::Tensor>& tensors, std::size_t which, std::size_t first,
                           std::size_t bytes) {
    const at::Tensor& tensor = tensors.at(which);
    if (!tensor.is_cpu() || !tensor.is_contiguous() || first + bytes > tensor.nbytes())
      throw Error(ErrorKind::kValue, "a tensor of a parcel has to be contiguous, on the CPU, and of its size");
    return static_cast<std::byte*>(tensor.data_ptr()) + first;
  }

  const std::string head_;
  const std::vector<Span> spans_;
  const std::size_t total_;
  const std::shared_ptr<PayloadPool> pool_ = std::make_shared<PayloadPool>();
};

int64_t first_non_finite_of(const at::Tensor& tensor) {
  require_flat(tensor, tensor.scalar_type(), "a tensor");
  const auto look = first_non_finite(element_type(tensor.scalar_type(), "a look for what is not finite"));
  const auto count = static_cast<std::size_t>(tensor.numel());
  if (look == nullptr || count == 0) return -1;
  const py::gil_scoped_release no_gil;
  const std::size_t found = look(tensor.const_data_ptr(), count);
  return found < count ? static_cast<int64_t>(found) : -1;
}

}  // namespace

void bind_mailbox(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Handle>(module, "Mailbox", "Messages of a header and a payload between the members of a group, over ring.")
      .def(py::init<const c10::intrusive_ptr<c10d::ProcessGroup>&, const std::string&, std::size_t>(), py::kw_only(),
           py::arg("group"), py::arg("name"), py::arg("most_bytes"),
           "`name`: the same on all members, never used before. `most_bytes`: of a payload that comes.")
      .def(
          "expect",
          [](Handle& self, int from, bool answers) {
            self.box().expect(answers ? Mailbox::kAnswers : Mailbox::kRequests, from);
          },
          py::arg("source"), py::kw_only(), py::arg("answers"), NoGil(),
          "Take one more request of that member when it comes; or, from now on, its answers.")
      .def("land", &land, py::arg("source"), py::arg("memory"),
           "That member's next answer is received into this memory, if it has its size.")
      .def(
          "require", [](Handle& self, int member) { self.box().require(member); }, py::arg("member"), NoGil(),
          "Raise the error by which that member was lost.")
      .def("request", &request, py::arg("timeout_ms"),
           "(True, member, header, payload) of the next request; None after the time, or when it is closed. A member "
           "that is lost: (True, member, None, None), once.")
      .def("answer", &answer, py::arg("source"), py::arg("timeout_ms"), py::kw_only(), py::arg("serves"),
           "(False, member, header, payload) of that member's next answer, or, if this rank `serves`, what `request` "
           "returns, whichever comes first. Raises PeerLostError where the member is lost.")
      .def("send", &send, py::arg("to"), py::arg("header"), py::arg("payload").none(true), py::kw_only(),
           py::arg("answers"), py::arg("waits"),
           "Send a request or an answer; its payload is read until the member has taken it. `waits`: first until "
           "little is on its way to it. Returns for how many nanoseconds.")
      .def("close", [](Handle& self) { self.box().close(); }, NoGil(), "Idempotent.");
  py::class_<Parcel>(module, "Parcel", "How parts of several flat tensors lie in a payload, behind a head.")
      .def(py::init([](const py::bytes& head, std::vector<Parcel::Span> spans, std::size_t total) {
             return Parcel(head, std::move(spans), total);
           }),
           py::arg("head"), py::arg("spans"), py::arg("total"),
           "`spans`: (tensor, its first byte, bytes, place in the payload), by place; `total`: without the head.")
      .def("pack", &Parcel::pack, py::arg("tensors"), "The head and the parts: a new tensor, uint8.")
      .def("unpack", &Parcel::unpack, py::arg("body"), py::arg("tensors"),
           "Copy the parts at the end of a payload into the tensors.");
  module.def("first_non_finite", &first_non_finite_of, py::arg("tensor"),
             "The index of its first element with an infinity or a NaN; -1: there is none.");
}

}  // namespace ringdp
