// What this process does now, for dumps and stall notices: the stacks of its threads, in Python and in C++, as text.
// The core knows no Python: the module that does sets a StackSource. Any thread, except that no lock may be held which
// a thread that holds Python's needs.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ringdp {

inline constexpr std::size_t kStacksBytes = 12 * 1024;  // longest text of stacks

struct StackSource {
  // One call at a time. Python's stacks within that time, "File "x.py", line 3 in f" innermost first, the main
  // thread's first.
  std::function<std::string(int64_t limit_ms)> python;
  // The stack of a number in OperationRecord::call_site, a frame a line, innermost first.
  std::function<std::string(int32_t)> call_site;
  std::vector<std::string> foreign;  // beginnings of paths that are not the user's: Python's, torch's, ringdp's
};

void set_stack_source(StackSource source);  // empty functions: none, as at the start

// Asked for by several ranks within half a second, all get the same.
std::string process_stacks(int64_t limit_ms = 500);
std::string call_site_text(int32_t number);  // empty where it is not known

// How many threads run code of the program, and when the interpreter last began to count them; -1: it never has. Any
// thread.
struct ProgramThreadCount {
  int count = -1;
  std::chrono::steady_clock::time_point at{};
};
void note_program_threads(const ProgramThreadCount& counted);
ProgramThreadCount program_threads();

// "train.py:88 in load_batch": of `stacks` the innermost frame that is the user's; where none is, the innermost; or
// empty.
std::string frame_of_script(const std::string& stacks);

}  // namespace ringdp
