// The C++ stack of this process's main thread, as text. A real-time signal interrupts the thread, which records its
// own return addresses, as in a sampling profiler; no ptrace. A system call in progress is restarted (SA_RESTART), or
// ends with EINTR where the kernel does not restart that call. Any thread but the main one; one at a time.
#pragma once

#include <cstdint>
#include <string>

namespace ringdp {

// Installs the handler; false if the signal already has one. Called once, before the first stack is asked for.
bool prepare_native_stack();

// Frames, innermost first, a line each; or why there is none ("it is in uninterruptible sleep", …).
std::string native_stack_of_main(int64_t limit_ms);

}  // namespace ringdp
