// How long a thread could have run while it had no core: other threads had it, or the quota of its cgroup was used up.
// Any thread, for itself; it keeps a descriptor until it ends.
#pragma once

#include <cstdint>

namespace ringdp {

struct RunDelay {
  int64_t ns = 0;                // since the thread began; 0 where the kernel does not say (proc(5), schedstat)
  const void* thread = nullptr;  // tells the threads of this process apart

  static RunDelay of_this_thread() noexcept;
  // Since `before`, ns; 0 if another thread read that.
  int64_t since(const RunDelay& before) const noexcept {
    return thread == before.thread && ns > before.ns ? ns - before.ns : 0;
  }
};

}  // namespace ringdp
