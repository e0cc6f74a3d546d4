// Hooks: what torch's users are told of a process group of ring: that it fails (abort hooks, torch 2.14) and that an
// operation has succeeded (completion hooks, torch 2.15). Owned by a ProcessGroupRing and shared with its works. Any
// thread; an abort hook may take Python's lock, so it runs on a thread of its own, a completion hook must not.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace c10d {
struct CompletionHookArgs;  // since torch 2.15
}

namespace ringdp {

class Hooks {
 public:
  using AbortHook = std::function<void()>;
  using CompletionHook = std::function<void(const c10d::CompletionHookArgs&)>;

  Hooks() = default;
  ~Hooks();
  Hooks(const Hooks&) = delete;
  Hooks& operator=(const Hooks&) = delete;

  // Throw Error(kValue) for a number that is in use, or is not. An abort hook that is removed has ended then.
  void add_abort_hook(int64_t id, AbortHook hook);
  void remove_abort_hook(int64_t id);
  void add_completion_hook(int64_t id, CompletionHook hook);
  void remove_completion_hook(int64_t id);

  // What Engine::listen takes: a failure runs the abort hooks, as long as the caller keeps it. It must go before this
  // does.
  std::shared_ptr<const FailureListener> make_listener() {
    return std::make_shared<const FailureListener>([this](const std::exception_ptr&) { on_failure(); });
  }
  void run_abort_hooks() const;  // now, on this thread; what one throws goes to the log
  // Returns when the abort hooks that a failure has started have ended; at once on the thread that runs them.
  void wait_for_abort_hooks();
  // The same for all process groups, before Python ends: a hook may wait for its lock. Gives up after two minutes.
  static void wait_for_all_abort_hooks();
  // `completion_key`: of the work that has succeeded.
  void completed(uint64_t completion_key) const {
    if (has_completion_hooks_.load(std::memory_order_relaxed)) run_completion_hooks(completion_key);
  }

 private:
  // By pointer: a hook may hold an object of Python's, and a copy or the end of one takes Python's lock.
  template <typename Hook>
  using Table = std::map<int64_t, std::shared_ptr<const Hook>>;

  void on_failure();
  void run_after_failure();
  void run_completion_hooks(uint64_t completion_key) const;
  template <typename Hook>
  void add(Table<Hook>& hooks, int64_t id, Hook hook, const char* kind);
  template <typename Hook>
  void remove(Table<Hook>& hooks, int64_t id, const char* kind);
  template <typename Hook>
  std::vector<std::shared_ptr<const Hook>> all(const Table<Hook>& hooks) const;

  const unsigned generation_ = fork_generation();
  mutable std::mutex mutex_;  // of what follows
  Table<AbortHook> abort_hooks_;
  Table<CompletionHook> completion_hooks_;
  std::unique_ptr<std::thread> aborting_;  // runs the abort hooks after a failure; null before the first
  bool aborting_now_ = false;              // that thread has not ended
  bool failed_again_ = false;              // meanwhile
  std::thread::id aborting_id_;            // while it runs
  std::condition_variable aborting_ended_;
  std::atomic<bool> has_completion_hooks_{false};
};

}  // namespace ringdp
