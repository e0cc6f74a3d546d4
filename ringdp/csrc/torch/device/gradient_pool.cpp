#include "torch/device/gradient_pool.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <mutex>

#include "base/block_pool.h"
#include "base/log.h"

namespace ringdp {
namespace {

constexpr std::size_t kFromBytes = std::size_t{1} << 20;

// Never destroyed: tensors may be freed after static destruction.
BlockPool& pool() {
  static BlockPool* const it = new BlockPool;
  return *it;
}

thread_local std::weak_ptr<void> backward_here;
thread_local int scopes_here = 0;

// backward_here is destroyed before its backward's thread runs another one. A Scope's allocations last long, and a
// block below a huge page would waste its rest.
bool from_pool(std::size_t bytes) {
  if (bytes < kFromBytes) return false;
  if (scopes_here > 0) return bytes >= BlockPool::kUnitBytes;
  return torch::autograd::get_current_graph_task_id() != -1 && !backward_here.expired();
}

void release_block(void* block) {
  c10::profiledCPUMemoryReporter().Delete(block);  // before another thread may get the address
  pool().release(block);
}

class GradientAllocator final : public c10::Allocator {
 public:
  explicit GradientAllocator(c10::Allocator& next) : next_(next) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (from_pool(bytes)) {
      if (void* const block = pool().allocate(bytes)) {
        c10::profiledCPUMemoryReporter().New(block, bytes);
        return {block, block, &release_block, c10::Device(c10::DeviceType::CPU)};
      }
    }
    return next_.allocate(bytes);
  }

  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return next_.is_simple_data_ptr(data); }
  c10::DeleterFnPtr raw_deleter() const override { return &release_raw; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { next_.copy_data(to, from, bytes); }

  static std::atomic<GradientAllocator*> installed;

 private:
  // For raw_deallocate, which sees a pointer only.
  static void release_raw(void* block) {
    if (pool().owns(block)) return release_block(block);
    installed.load(std::memory_order_relaxed)->next_.raw_deleter()(block);
  }

  c10::Allocator& next_;
};

std::atomic<GradientAllocator*> GradientAllocator::installed{nullptr};

void note_replaced(const char* when) {
  log(LogLevel::kWarning, std::string("another library replaced torch's CPU allocator ") + when +
                              ": gradients' memory comes from that allocator, and gradient_pool has no effect");
}

class Installation {
 public:
  bool join() {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kUntried) state_ = install() ? State::kDone : State::kRefused;
    if (state_ != State::kDone) return false;
    if (++members_ == 1) pool().keep(true);
    return true;
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    if (--members_ == 0) pool().keep(false);
  }

  // Whether allocations still reach the pool; one log line if not.
  void check() {
    if (c10::GetCPUAllocator() == GradientAllocator::installed || noted_.exchange(true)) return;
    note_replaced("after RingDP had installed its own");
  }

 private:
  enum class State { kUntried, kDone, kRefused };

  bool install() {
    c10::Allocator* const before = c10::GetCPUAllocator();
    if (before != c10::GetDefaultCPUAllocator() || before->raw_deleter() == nullptr) {
      note_replaced("before RingDP could install its own");
      return false;
    }
    auto* const ours = new GradientAllocator(*before);  // torch keeps it for as long as the process lives
    GradientAllocator::installed = ours;
    c10::SetCPUAllocator(ours);
    if (c10::GetCPUAllocator() != ours) {
      log(LogLevel::kWarning, "torch keeps another CPU allocator of higher priority: gradient_pool has no effect");
      return false;
    }
    pthread_atfork([] { pool().lock_for_fork(); }, [] { pool().unlock_after_fork(); },
                   [] { pool().unlock_after_fork(); });
    return true;
  }

  std::mutex mutex_;
  State state_ = State::kUntried;
  int members_ = 0;
  std::atomic<bool> noted_{false};
};

Installation& installation() {
  static Installation* const it = new Installation;
  return *it;
}

}  // namespace

GradientPool::Scope::Scope(bool on) : on_(on) {
  if (on_) ++scopes_here;
}

GradientPool::Scope::~Scope() {
  if (on_) --scopes_here;
}

GradientPool::GradientPool(bool wanted) : on_(wanted && installation().join()) {}

GradientPool::~GradientPool() {
  if (on_) installation().leave();
}

std::shared_ptr<void> GradientPool::during_backward() const {
  if (!on_) return nullptr;
  installation().check();
  if (auto running = backward_here.lock()) return running;  // of another RingDP, or of the enclosing backward
  const std::shared_ptr<void> mark(&pool(), [](void*) { pool().end_step(); });
  backward_here = mark;
  return mark;
}

bool GradientPool::owns(const void* memory) { return pool().owns(memory); }

GradientPool::Use GradientPool::use() {
  const BlockPool::Use of_pool = pool().use();
  return {GradientAllocator::installed.load() != nullptr && c10::GetCPUAllocator() == GradientAllocator::installed,
          of_pool.in_use_bytes, of_pool.idle_bytes};
}

}  // namespace ringdp
