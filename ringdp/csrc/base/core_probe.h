// CoreProbe: how fast a core computes now, by a loop that is always the same and takes about a microsecond. It keeps
// the core's floating point units busy, so it takes longer while the core's other hardware thread (of another virtual
// machine, perhaps) uses them too, at a low clock, and on a slower processor. The kernel's accounts do not show the
// first. Value type; one for each thread that is measured.
//
// How long a thread was runnable without running: other threads had the core, or the quota of its cgroup was used up.
// A thread asks about itself, and keeps a descriptor until it ends.
#pragma once

#include <cstdint>

namespace ringdp {

struct RunDelay {
  int64_t ns = 0;                // since the thread began; 0 where the kernel does not say (proc(5), schedstat)
  const void* thread = nullptr;  // identifies a thread of this process

  static RunDelay of_this_thread() noexcept;
  // Since `before`, ns; 0 if another thread read that.
  int64_t since(const RunDelay& before) const noexcept {
    return thread == before.thread && ns > before.ns ? ns - before.ns : 0;
  }
};

class CoreProbe {
 public:
  // Runs the loop.
  void sample() noexcept;
  // Seconds, of the samples since the last call; 0 without any.
  float take_mean() noexcept;

 private:
  static constexpr float kMost = 4.0F;  // times the shortest; a longer sample was interrupted

  float shortest_ = 0.0F;
  float sum_ = 0.0F;
  int samples_ = 0;
};

}  // namespace ringdp
