// Waits for futures that this rank's Python completes (a communication hook's), or another backend's library. torch's
// own wait neither reacts to Ctrl-C nor has a limit. Called by the threads that run backward, without the GIL.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/python_headers.h>

#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ringdp {

// `count()`: how many of Python's threads do not run code of the program; null: 0. With Python's lock.
void set_helper_threads(PyObject* count);

// Counts the threads of the program (note_program_threads). On the main thread also runs Python's signal handlers, and
// throws their exceptions.
void check_python_signals();

// The interval at which a thread that waits for a future runs Python's signal handlers.
inline constexpr std::chrono::milliseconds kInterruptPeriod{100};

// True once the future is complete, with a value or an error; false after `limit` (zero: no limit). About ten times a
// second it runs Python's signal handlers and calls `look`, if there is one; both may throw.
bool wait_until_complete(c10::ivalue::Future& future, std::chrono::milliseconds limit,
                         const std::function<void()>& look = nullptr);

// The timeout of the group's operations on that kind of device; zero if the backend has none.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group, c10::DeviceType device);

}  // namespace ringdp
