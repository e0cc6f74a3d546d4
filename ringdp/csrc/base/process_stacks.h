// What this process does now, for dumps and stall notices: the stacks of its threads, in Python and in C++, as text.
// The core does not know Python: a module that does sets a StackSource. Any thread. The caller must not hold a lock
// that a thread with the GIL may wait for.
//
// The C++ stack of this process's main thread, as text. A real-time signal interrupts the thread, which records its
// own return addresses, as in a sampling profiler; no ptrace. A system call in progress is restarted (SA_RESTART), or
// ends with EINTR where the kernel does not restart that call. Any thread but the main one; one at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ringdp {

// Installs the handler; false if the signal already has one. Called once, before the first stack is asked for.
bool prepare_native_stack();

// Frames, innermost first, a line each; or why there is none ("it is in uninterruptible sleep", …).
std::string native_stack_of_main(int64_t limit_ms);

inline constexpr std::size_t kStacksBytes = 12 * 1024;  // longest text of stacks

struct StackSource {
  // Python's stacks, the main thread's first, each innermost frame first: "File "x.py", line 3 in f". Takes at most
  // that time. One call at a time.
  std::function<std::string(int64_t limit_ms)> python;
  // The stack behind a number of OperationRecord::call_site: a line for each frame, innermost first.
  std::function<std::string(int32_t)> call_site;
  std::vector<std::string> foreign;  // prefixes of paths that are not the user's code: Python's, torch's, ringdp's
};

void set_stack_source(StackSource source);  // empty functions remove it; initially there is none

// Ranks that ask within half a second all get the same text.
std::string process_stacks(int64_t limit_ms = 500);
std::string call_site_text(int32_t number);  // empty where it is not known

// The number of threads that run code of the program, and when the interpreter last counted them; -1: never. Any
// thread.
struct ProgramThreadCount {
  int count = -1;
  std::chrono::steady_clock::time_point at{};
};
void note_program_threads(const ProgramThreadCount& counted);
ProgramThreadCount program_threads();

// "train.py:88 in load_batch": the innermost frame of `stacks` in the user's code, else the innermost one; empty if
// there is none.
std::string frame_of_script(const std::string& stacks);

}  // namespace ringdp
