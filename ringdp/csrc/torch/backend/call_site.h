// Call sites: a number for the Python stack that issued an operation. Looking up a known stack takes neither Python's
// lock nor memory: the key is made from this thread's own frames, which do not change while the thread is in C++. A
// new stack takes the lock once, and keeps references to its code objects, so that its key remains unique. Any thread,
// with Python's lock or without it.
#pragma once

#include <cstdint>
#include <string>

namespace ringdp {

// -1: this thread does not run Python, there are kMostCallSites already, or the frame layout of this Python is not
// supported.
int32_t python_call_site();

// "train.py:88 in step", a frame a line, innermost first; empty for an unknown number. Does not need Python's lock.
std::string python_call_site_text(int32_t number);

inline constexpr int kMostCallSites = 2048;

}  // namespace ringdp
