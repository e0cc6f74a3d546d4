#include "torch/device/device_copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "torch/device/native_stream.h"

namespace ringdp {
namespace {

at::Tensor bytes_at(const std::byte* memory, std::size_t bytes, c10::Device device) {
  return at::for_blob(const_cast<std::byte*>(memory), {static_cast<int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

// On the current stream of the tensor on a device. Below autograd and the caller's dispatch modes.
void copy(std::byte* to, c10::Device to_device, const std::byte* from, c10::Device from_device, std::size_t bytes) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  bytes_at(to, bytes, to_device).copy_(bytes_at(from, bytes, from_device), true);
}

}  // namespace

DeviceCopies::~DeviceCopies() {
  try {
    const c10::DeviceGuard guard(streams_.in.device());
    called_.reset();
    events_.clear();
  } catch (const std::exception&) {  // after a fork the device cannot be used
  }
}

void DeviceCopies::after_caller() {
  const c10::DeviceGuard guard(streams_.in.device());
  const c10::impl::VirtualGuardImpl device(streams_.in.device_type());
  called_->record(device.getStream(streams_.in.device()));
  called_->block(streams_.in);
  results_ordered_ = false;
}

CopyQueue::Ticket DeviceCopies::record(c10::Stream stream) {
  events_.emplace_back(stream.device_type()).record(stream);
  return events_.size() - 1;
}

CopyQueue::Ticket DeviceCopies::to_host(std::byte* host, const std::byte* device, std::size_t bytes) {
  const c10::StreamGuard guard(streams_.in);
  copy(host, c10::kCPU, device, streams_.in.device(), bytes);
  return record(streams_.in);
}

// Ordered only now: the stream may have copies of earlier operations, which need not wait for this caller.
void DeviceCopies::order_results() {
  if (!results_ordered_) called_->block(streams_.out);
  results_ordered_ = true;
}

CopyQueue::Ticket DeviceCopies::to_device(std::byte* device, const std::byte* host, std::size_t bytes) {
  const BesideCudaGraphs beside;
  const c10::StreamGuard guard(streams_.out);
  order_results();
  copy(device, streams_.out.device(), host, c10::kCPU, bytes);
  return record(streams_.out);
}

CopyQueue::Ticket DeviceCopies::follow(std::function<void()> work) {
  const BesideCudaGraphs beside;
  const c10::StreamGuard guard(streams_.out);
  order_results();
  work();
  return record(streams_.out);
}

bool DeviceCopies::done(Ticket ticket) {
  const BesideCudaGraphs beside;
  const c10::DeviceGuard guard(streams_.in.device());
  return events_[ticket].query();
}

void DeviceCopies::after_all(const std::function<void()>& what) {
  const c10::StreamGuard guard(streams_.out);
  what();
}

// After the last copy of this operation, not after those of later ones that share the stream.
void DeviceCopies::order_caller() {
  if (events_.empty()) return;
  const c10::DeviceGuard guard(streams_.out.device());
  const c10::impl::VirtualGuardImpl device(streams_.out.device_type());
  events_.back().block(device.getStream(streams_.out.device()));
}

void DeviceCopies::wait() {
  const BesideCudaGraphs beside;
  const c10::DeviceGuard guard(streams_.in.device());
  for (const c10::Event& event : events_) event.synchronize();
}

}  // namespace ringdp
