// FlowRecord: when the bytes of one flow moved, and how many. Written by the thread that drives the engine through the
// flow's link, read by any thread at any time: each value is atomic, and they are not of one moment. Owned by the
// OperationRecorder.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/deadline.h"

namespace ringdp {

// Times of records: nanoseconds of the steady clock, which is CLOCK_MONOTONIC and so Python's time.monotonic_ns().
inline int64_t nanoseconds_of(Clock::time_point at) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

struct FlowRecord {
  std::atomic<int32_t> peer{-1};     // its place in the Runtime's world
  std::atomic<bool> sends{false};    // or receives
  std::atomic<int64_t> first_ns{0};  // the first byte came or went; of a flow without bytes its one frame; 0: not yet
  std::atomic<int64_t> last_ns{0};   // the last one so far
  std::atomic<uint64_t> moved{0};    // bytes
  std::atomic<uint64_t> total{0};
  std::atomic<int64_t> work_first_ns{
      0};  // work on its bytes began: encoding, adding, decoding, copying; 0: none was noted
  std::atomic<int64_t> work_last_ns{0};  // and ended so far
  std::atomic<int64_t> work_ns{0};       // spent on it, between these

  void begin(int to_or_from, bool sending, uint64_t bytes) {
    peer.store(to_or_from, std::memory_order_relaxed);
    sends.store(sending, std::memory_order_relaxed);
    first_ns.store(0, std::memory_order_relaxed);
    last_ns.store(0, std::memory_order_relaxed);
    moved.store(0, std::memory_order_relaxed);
    total.store(bytes, std::memory_order_relaxed);
    work_first_ns.store(0, std::memory_order_relaxed);
    work_last_ns.store(0, std::memory_order_relaxed);
    work_ns.store(0, std::memory_order_relaxed);
  }
  // A long frame begins: its bytes take a while.
  void note_begin() {
    if (first_ns.load(std::memory_order_relaxed) == 0)
      first_ns.store(nanoseconds_of(Clock::now()), std::memory_order_relaxed);
  }
  void note(uint64_t bytes_so_far) {
    const int64_t now = nanoseconds_of(Clock::now());
    if (first_ns.load(std::memory_order_relaxed) == 0) first_ns.store(now, std::memory_order_relaxed);
    last_ns.store(now, std::memory_order_relaxed);
    moved.store(bytes_so_far, std::memory_order_relaxed);
  }
  // Work on bytes of the flow that began at `begin_ns` and has ended now. Not recorded for few bytes, for which the
  // clock would cost too much.
  void note_work(int64_t begin_ns) {
    const int64_t end_ns = nanoseconds_of(Clock::now());
    if (end_ns - begin_ns < kLeastWorkNs) return;
    if (work_first_ns.load(std::memory_order_relaxed) == 0) work_first_ns.store(begin_ns, std::memory_order_relaxed);
    work_last_ns.store(end_ns, std::memory_order_relaxed);
    work_ns.store(work_ns.load(std::memory_order_relaxed) + end_ns - begin_ns, std::memory_order_relaxed);
  }

  static constexpr std::size_t kLeastWorkBytes = 16 * 1024;
  static constexpr int64_t kLeastWorkNs = 2000;
};

}  // namespace ringdp
