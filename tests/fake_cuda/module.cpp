// What Python has of the fake device (load.py).
#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/utils/pybind.h>

#include "fake.h"
#include "nccl.h"

PYBIND11_MODULE(fake_cuda, module) {
  using fake_cuda::Machine;
  const py::call_guard<py::gil_scoped_release> no_gil;
  c10::SetAllocator(c10::DeviceType::CUDA, fake_cuda::allocator(), /*priority=*/10);
  module.def("set_order", [](uint64_t seed, int longest_us) { Machine::here().set_order(seed, longest_us); });
  module.def("synchronize", [] { Machine::here().wait_for_all(); }, no_gil);
  module.def("forbid_waits", [](bool forbidden) { Machine::here().forbid_waits(forbidden); });
  module.def("fail", [](bool failed) { Machine::here().fail(failed); });
  module.def("rest", [](int64_t us) {
    Machine::here().queue_rest(fake_cuda::current_stream(), std::chrono::microseconds(us));
  });
  module.def("known", [] { return at::hasCUDA(); }, "Whether torch asked for its hooks after they were there.");
  fake_cuda::bind_nccl(module);
}
