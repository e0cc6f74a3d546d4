#include "torch/device/device_side.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>

#include "base/error.h"
#include "torch/device/native_stream.h"

namespace ringdp {
namespace {

std::atomic<const MakeCopyQueue*> cpu_queues{nullptr};
std::atomic<bool> stages_cpu{false};

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  const std::less<> before;
  return before(a.data(), b.data() + b.size()) && before(b.data(), a.data() + a.size());
}

}  // namespace

bool DeviceSide::stages(const at::Tensor& tensor) { return !tensor.is_cpu() || stages_cpu.load(); }

void DeviceSide::stage_cpu_tensors(const MakeCopyQueue* queues) {
  if (queues != nullptr) cpu_queues.store(queues);
  stages_cpu.store(queues != nullptr);
}

SideStreams DeviceSide::streams_of(c10::Device device) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(device.index());
  if (found != streams_.end()) return found->second;
  const c10::impl::VirtualGuardImpl guard(device.type());
  // Of high priority: not from the pool of the program's own streams and of futures' callbacks, and copies run before
  // computation.
  const auto make = [&] { return guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true); };
  const SideStreams made{make(), make()};
  return streams_.emplace(device.index(), made).first->second;
}

std::shared_ptr<Staging> DeviceSide::make_staging(c10::Device device, const char* what) {
  if (device.is_cpu()) return std::make_shared<Staging>((*cpu_queues.load())());
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (records_cuda_graph(guard.getStream(device)))
    throw Error(ErrorKind::kState,
                std::string(what) + ": the current stream of " + device.str() +
                    " records a CUDA graph, and ring carries tensors through the host, which no graph "
                    "can replay: call it outside of the capture");
  return std::make_shared<Staging>(std::make_unique<DeviceCopies>(streams_of(device)));
}

at::Tensor DeviceSide::make_mirror(std::size_t bytes, c10::Device device) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).pinned_memory(!device.is_cpu()));
}

void DeviceSide::wait_for_earlier(const DeviceUse& use) {
  std::vector<c10::intrusive_ptr<RingWork>> earlier;
  {
    const std::lock_guard lock(mutex_);
    for (const Known& it : uses_)
      if ((it.use.writes || use.writes) && overlap(it.use.memory, use.memory))
        if (auto work = it.work.lock()) earlier.push_back(std::move(work));
  }
  for (const auto& work : earlier) work->wait(kNoTimeout);
}

void DeviceSide::remember(const c10::intrusive_ptr<RingWork>& work, const DeviceUse& use) {
  std::vector<c10::intrusive_ptr<RingWork>> over;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  std::erase_if(uses_, [&](const Known& it) {
    auto earlier = it.work.lock();
    const bool gone = !earlier || earlier->isCompleted();
    if (earlier) over.push_back(std::move(earlier));
    return gone;
  });
  uses_.push_back({c10::weak_intrusive_ptr<RingWork>(work), use});
}

}  // namespace ringdp
