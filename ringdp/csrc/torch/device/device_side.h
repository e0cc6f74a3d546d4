// DeviceSide: a process group's resources on devices: the streams for its copies, pinned memory, and the list of calls
// that still use a device's memory. Owned by the process group, shared with calls of several stages, which may outlive
// it. Any thread. Nothing blocks, except wait_for_earlier for memory that an earlier call still uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "device/staging.h"
#include "torch/backend/work.h"
#include "torch/device/device_copies.h"

namespace ringdp {

// The use of a device's memory by one operation.
struct DeviceUse {
  std::span<const std::byte> memory;  // on the device
  bool writes;
};

class DeviceSide {
 public:
  // Whether the core uses a mirror of such tensors instead of their own memory.
  static bool stages(const at::Tensor& tensor);
  // From now on this process treats CPU tensors as if they were on a device with copies by these queues; null ends it.
  // `queues` is kept until the process ends. For tests.
  static void stage_cpu_tensors(const MakeCopyQueue* queues);

  // Throws Error(kState), naming `what`, if the thread records a CUDA graph on this device.
  std::shared_ptr<Staging> make_staging(c10::Device device, const char* what);
  static at::Tensor make_mirror(std::size_t bytes, c10::Device device);  // uint8 [bytes], pinned for devices

  // Waits for earlier calls that still write this memory of a device, or, with `writes`, use it in any way, and orders
  // the current stream after them: as if all were on one stream, though callers must not count on that.
  void wait_for_earlier(const DeviceUse& use);
  void remember(const c10::intrusive_ptr<RingWork>& work, const DeviceUse& use);

 private:
  struct Known {
    c10::weak_intrusive_ptr<RingWork> work;
    DeviceUse use;
  };

  SideStreams streams_of(c10::Device device);

  std::mutex mutex_;
  std::map<c10::DeviceIndex, SideStreams> streams_;
  std::vector<Known> uses_;
};

}  // namespace ringdp
