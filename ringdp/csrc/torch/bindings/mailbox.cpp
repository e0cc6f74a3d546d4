// Mailbox for Python. All calls release the GIL.
#include "torch/backend/mailbox.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "torch/bindings/bindings.h"
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
    box_ = Mailbox::make(*ring, name, most_bytes);
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

using Received = std::tuple<int, std::optional<py::bytes>, std::optional<at::Tensor>>;

std::optional<Received> next(Handle& handle, int from, int64_t timeout_ms) {
  std::optional<Mailbox::Message> message;
  {
    const py::gil_scoped_release no_gil;
    message = handle.box().next(from, timeout_ms);
  }
  if (!message) return std::nullopt;
  if (message->lost) return Received{message->from, std::nullopt, std::nullopt};
  return Received{message->from, py::bytes(message->header), std::move(message->payload)};
}

int64_t send(Handle& handle, int to, const py::bytes& header, std::optional<at::Tensor> payload, bool waits) {
  const std::string text = header;
  at::Tensor tensor = payload ? std::move(*payload) : at::Tensor();
  payload.reset();
  const py::gil_scoped_release no_gil;
  return handle.box().send(to, text, std::move(tensor), waits);
}

}  // namespace

void bind_mailbox(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Handle>(module, "Mailbox", "Messages of a header and a payload between the members of a group, over ring.")
      .def(py::init<const c10::intrusive_ptr<c10d::ProcessGroup>&, const std::string&, std::size_t>(), py::kw_only(),
           py::arg("group"), py::arg("name"), py::arg("most_bytes"),
           "`name`: the same on all members, never used before. `most_bytes`: of a payload that comes.")
      .def(
          "expect", [](Handle& self, int from) { self.box().expect(from); }, py::arg("source"), NoGil(),
          "Take one more message of that member when it comes.")
      .def(
          "require", [](Handle& self, int member) { self.box().require(member); }, py::arg("member"), NoGil(),
          "Raise the error by which that member was lost.")
      .def("next", &next, py::arg("source"), py::arg("timeout_ms"),
           "(member, header, payload) of the next message of that member, or of any one (-1); None after the time, or "
           "when it is closed. A member that is lost: (member, None, None), once; PeerLostError where it is `source`.")
      .def("send", &send, py::arg("to"), py::arg("header"), py::arg("payload").none(true), py::kw_only(),
           py::arg("waits"),
           "Send a message; its payload is read until the member has taken it. `waits`: first until little is on its "
           "way to it. Returns for how many nanoseconds.")
      .def("close", [](Handle& self) { self.box().close(); }, NoGil(), "Idempotent.");
}

}  // namespace ringdp
