// The C++ stack of this process's main thread, as text. The thread is interrupted by a real-time signal and notes its
// own addresses, as a sampling profiler does; nothing is traced from outside. A call that it sits in goes on
// (SA_RESTART), or ends with EINTR where the kernel does not restart that call. Any thread but the main one; one at a
// time.
#pragma once

#include <cstdint>
#include <string>

namespace ringdp {

// Takes the signal, where it has no handler; false where it has. Called once, before the first stack is wanted.
bool prepare_native_stack();

// Frames, innermost first, a line each; or why there is none ("it is in uninterruptible sleep", …).
std::string native_stack_of_main(int64_t limit_ms);

}  // namespace ringdp
