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

}  // namespace ringdp
