#include "base/run_delay.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

#include "base/fd.h"

namespace ringdp {

RunDelay RunDelay::of_this_thread() noexcept {
  thread_local const Fd file(::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC));
  RunDelay delay{.ns = 0, .thread = &file};
  if (!file) return delay;
  std::array<char, 96> text{};
  if (::pread(file.get(), text.data(), text.size() - 1, 0) <= 0) return delay;
  char* second = nullptr;
  std::strtoll(text.data(), &second, 10);  // the first is the time on a core
  delay.ns = std::strtoll(second, nullptr, 10);
  return delay;
}

}  // namespace ringdp
