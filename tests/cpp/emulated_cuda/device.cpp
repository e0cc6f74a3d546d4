// The threads of a block as fibers, each with a stack of its own; they are kept from one block to the next.
// setjmp and longjmp change hands: swapcontext would ask the kernel about signals each time.
#include <ucontext.h>

#include <csetjmp>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
static void __sanitizer_start_switch_fiber(void**, const void*, std::size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, std::size_t*) {}
#endif

namespace emulated {
namespace {

constexpr std::size_t kStackBytes = 128 << 10;

enum class State { kReady, kMeetsWarp, kMeetsBlock, kDone };

struct Stack {
  const void* bottom = nullptr;
  std::size_t size = 0;
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t first{};  // its beginning
  std::jmp_buf at{};   // later, where it stopped
  bool begun = false;
  State state = State::kDone;
  void* fake_stack = nullptr;
};

struct Warp {
  unsigned here = 0;
  RendezvousRun what = RendezvousRun::kShuffle;
  uint32_t brought[kWarp], seen[kWarp];
};

struct Device {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  const std::function<void()>* body = nullptr;
  unsigned threads = 0, running = 0, in_block_meeting = 0;
  std::jmp_buf scheduler{};
  void* scheduler_fake_stack = nullptr;
  Stack scheduler_stack;
};

Device& device() {
  static Device it;
  return it;
}

void back_to_scheduler(State state) {
  Device& it = device();
  Fiber& self = it.fibers[it.running];
  self.state = state;
  if (_setjmp(self.at) == 0) {
    __sanitizer_start_switch_fiber(&self.fake_stack, it.scheduler_stack.bottom, it.scheduler_stack.size);
    _longjmp(it.scheduler, 1);
  }
  __sanitizer_finish_switch_fiber(self.fake_stack, nullptr, nullptr);
}

void live() {
  Device& it = device();
  __sanitizer_finish_switch_fiber(nullptr, &it.scheduler_stack.bottom, &it.scheduler_stack.size);
  for (;;) {
    (*it.body)();
    back_to_scheduler(State::kDone);
  }
}

void resume(unsigned thread) {
  Device& it = device();
  Fiber& fiber = it.fibers[thread];
  it.running = thread;
  threadIdx.x = thread;
  if (_setjmp(it.scheduler) == 0) {
    __sanitizer_start_switch_fiber(&it.scheduler_fake_stack, fiber.stack.get(), kStackBytes);
    if (std::exchange(fiber.begun, true)) _longjmp(fiber.at, 1);
    setcontext(&fiber.first);
  }
  __sanitizer_finish_switch_fiber(it.scheduler_fake_stack, nullptr, nullptr);
}

void make_fibers(unsigned threads) {
  Device& it = device();
  it.threads = threads;
  it.warps.assign((threads + kWarp - 1) / kWarp, {});
  if (it.fibers.size() >= threads) return;
  it.fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : it.fibers) {
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.get();
    fiber.first.uc_stack.ss_size = kStackBytes;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, live, 0);
  }
}

void run_block(unsigned block) {
  Device& it = device();
  for (unsigned i = 0; i < it.threads; ++i) it.fibers[i].state = State::kReady;
  for (unsigned done = 0; done < it.threads;) {
    bool moved = false;
    for (unsigned i = 0; i < it.threads; ++i) {
      const unsigned thread = block % 2 == 0 ? i : it.threads - 1 - i;  // no order is promised
      if (it.fibers[thread].state != State::kReady) continue;
      resume(thread);
      moved = true;
      done += it.fibers[thread].state == State::kDone;
    }
    if (!moved) throw std::logic_error("threads of block " + std::to_string(block) + " wait for others in vain");
  }
}

}  // namespace

void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  make_fibers(threads);
  device().body = &body;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) run_block(blockIdx.x);
}

const uint32_t* meet_warp(RendezvousRun what, uint32_t mine) {
  Device& it = device();
  const unsigned self = it.running, lane = self % kWarp, first = self - lane;
  Warp& warp = it.warps[self / kWarp];
  if (warp.here > 0 && warp.what != what)
    std::fprintf(stderr, "thread %u meets its warp for something else than the others\n", self), std::abort();
  warp.what = what;
  warp.brought[lane] = mine;
  if (++warp.here < kWarp) {
    back_to_scheduler(State::kMeetsWarp);
  } else {
    warp.here = 0;
    std::copy(warp.brought, warp.brought + kWarp, warp.seen);
    for (unsigned i = first; i < first + kWarp; ++i) it.fibers[i].state = State::kReady;
  }
  return warp.seen;
}

void meet_block() {
  Device& it = device();
  if (++it.in_block_meeting < it.threads) return back_to_scheduler(State::kMeetsBlock);
  it.in_block_meeting = 0;
  for (unsigned i = 0; i < it.threads; ++i) it.fibers[i].state = State::kReady;
}

}  // namespace emulated
