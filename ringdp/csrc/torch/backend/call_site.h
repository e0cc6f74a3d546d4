// Call sites: which Python code has issued an operation, as a number for its stack. Looking a known stack up takes
// neither Python's lock nor memory: the key is made from this thread's own frames, which nobody changes while the
// thread is in C++. A stack that is seen for the first time takes the lock once, and keeps references to its code
// objects, so that the key stays its own. Any thread, with Python's lock or without it.
#pragma once

#include <cstdint>
#include <string>

namespace ringdp {

// -1: this thread runs no Python, kMostCallSites are known already, or this Python's frames are not known to this file.
int32_t python_call_site();

// "train.py:88 in step", a frame a line, innermost first; empty for a number that is not known. Does not need Python's
// lock.
std::string python_call_site_text(int32_t number);

inline constexpr int kMostCallSites = 2048;

}  // namespace ringdp
