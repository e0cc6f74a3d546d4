// Threads of a Runtime: named, and without signals.
#pragma once

#include <pthread.h>

#include <csignal>
#include <memory>
#include <thread>

namespace ringdp {

// Signals are for the main thread: Python's handlers run there.
template <typename Body>
std::unique_ptr<std::thread> start_thread(const char* name, Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  auto thread = std::make_unique<std::thread>(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread->native_handle(), name);
  return thread;
}

inline void end_thread(std::unique_ptr<std::thread>& thread) {
  if (!thread || !thread->joinable()) return;
  if (thread->get_id() == std::this_thread::get_id())
    thread->detach();  // the last reference went away inside a callback
  else
    thread->join();
}

}  // namespace ringdp
