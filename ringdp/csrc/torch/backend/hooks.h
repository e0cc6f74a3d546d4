// Hooks: torch's abort hooks (2.14), called when a process group of ring fails, and completion hooks (2.15), called
// when an operation has succeeded. Owned by a ProcessGroupRing and shared with its works. Any thread; an abort hook
// may take Python's lock, so it runs on a thread of its own, a completion hook must not.
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

  // Throw Error(kValue) for a number that is in use, or for removing an unknown one. A removed abort hook is not
  // running when this returns.
  void add_abort_hook(int64_t id, AbortHook hook);
  void remove_abort_hook(int64_t id);
  void add_completion_hook(int64_t id, CompletionHook hook);
  void remove_completion_hook(int64_t id);

  // For Engine::listen: a failure runs the abort hooks, as long as the caller keeps the listener, which must be
  // destroyed before this.
  std::shared_ptr<const FailureListener> make_listener() {
    return std::make_shared<const FailureListener>([this](const std::exception_ptr&) { on_failure(); });
  }
  void run_abort_hooks() const;  // now, on this thread; exceptions are logged
  // Waits for abort hooks that a failure has started; returns at once on the thread that runs them.
  void wait_for_abort_hooks();
  // The same for all process groups, before Python ends, since a hook may need its lock. Gives up after two minutes.
  static void wait_for_all_abort_hooks();
  // `completion_key`: of the successful work.
  void completed(uint64_t completion_key) const {
    if (has_completion_hooks_.load(std::memory_order_relaxed)) run_completion_hooks(completion_key);
  }

 private:
  // By pointer: a hook may own a Python object, whose copy or destruction takes Python's lock.
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
  mutable std::mutex mutex_;  // guards the members below
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
