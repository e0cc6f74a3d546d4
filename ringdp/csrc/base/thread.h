// Threads: named, and without signals.
#pragma once

#include <pthread.h>

#include <csignal>
#include <memory>
#include <string>
#include <system_error>
#include <thread>

#include "base/error.h"

namespace ringdp {

// Signals are for the main thread: Python's handlers run there. Throws Error(kSystem).
template <typename Body>
std::unique_ptr<std::thread> start_thread(const char* name, Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::unique_ptr<std::thread> thread;
  int error_number = 0;
  try {
    thread = std::make_unique<std::thread>(std::move(body));
  } catch (const std::system_error& error) {
    error_number = error.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!thread)
    throw_system(std::string("start the thread ") + name + " (is ulimit -u or -v too small, or memory short?)",
                 error_number);
  pthread_setname_np(thread->native_handle(), name);
  return thread;
}

inline void end_thread(std::unique_ptr<std::thread>& thread) {
  if (!thread || !thread->joinable()) return;
  if (thread->get_id() == std::this_thread::get_id())
    thread->detach();  // this thread destroyed the last reference, inside a callback
  else
    thread->join();
}

}  // namespace ringdp
