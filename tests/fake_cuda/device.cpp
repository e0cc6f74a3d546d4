// Device type CUDA: its allocators, streams, events, and what torch asks of the one device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "fake.h"

namespace fake_cuda {
namespace {

c10::Stream as_stream(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* block = bytes > 0 ? Machine::here().allocate(bytes, current_stream()) : nullptr;
    return {block, block, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "copy_data of fake CUDA"); }

 private:
  static void release(void* block) {
    if (block != nullptr) Machine::here().release(block);
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    constexpr std::size_t kAlignment = 512;
    void* block = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
    const std::lock_guard lock(mutex());
    blocks()[block] = bytes;
    return {block, block, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  static bool owns(const void* address) {
    const std::lock_guard lock(mutex());
    auto found = blocks().upper_bound(address);
    if (found == blocks().begin()) return false;
    --found;
    return address < static_cast<const std::byte*>(found->first) + std::max<std::size_t>(found->second, 1);
  }

 private:
  static std::mutex& mutex() {
    static auto* it = new std::mutex;
    return *it;
  }
  static std::map<const void*, std::size_t>& blocks() {
    static auto* it = new std::map<const void*, std::size_t>;
    return *it;
  }
  static void release(void* block) {
    {
      const std::lock_guard lock(mutex());
      blocks().erase(block);
    }
    std::free(block);
  }
};

DeviceAllocator device_memory;
PinnedAllocator pinned_memory;

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_stream(Machine::here().next_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override { return as_stream(Machine::here().next_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return as_stream(exchange_stream(stream.id())); }
  bool queryStream(const c10::Stream& stream) const override { return Machine::here().idle(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Machine::here().note_wait();
    Machine::here().wait_for_stream(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Machine::here().note_wait();
    Machine::here().wait_for_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (memory.get() != nullptr) Machine::here().note_use(memory.get(), stream.id());
  }

  // An event that is recorded again does not change what earlier waits stand for.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Machine::here().throw_if_failed();
    if (*event == nullptr) *event = new MarkPointer;
    *static_cast<MarkPointer*>(*event) = Machine::here().record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Machine::here().queue_wait(stream.id(), *static_cast<MarkPointer*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Machine::here().reached(*static_cast<MarkPointer*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Machine::here().wait_for(*static_cast<MarkPointer*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPointer*>(event);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return PinnedAllocator::owns(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  void deviceSynchronize(c10::DeviceIndex) const override { Machine::here().wait_for_all(); }
};
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
// Before those that a torch with CUDA has.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, Hooks)

// torch's DDP wants one for its log.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
using c10d::RegistererTimerRegistry;
using c10d::TimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Timer)

}  // namespace

c10::Allocator* allocator() { return &device_memory; }
bool is_pinned(const void* address) { return PinnedAllocator::owns(address); }

}  // namespace fake_cuda
