#include "torch/backend/hooks.h"

#include <chrono>
#include <condition_variable>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "torch/bindings/without_python_lock.h"

namespace ringdp {
namespace {

template <typename Hook, typename... Arguments>
void call(const Hook& hook, const char* kind, Arguments&&... arguments) {
  try {
    hook(std::forward<Arguments>(arguments)...);
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("a ") + kind + " hook failed: " + error.what());
  }
}

// A template, so that it compiles where torch has no such arguments.
template <typename Args>
void call_completion_hooks(const std::vector<std::shared_ptr<const std::function<void(const Args&)>>>& hooks,
                           uint64_t completion_key) {
  if constexpr (requires { sizeof(Args); }) {
    Args args;
    args.completionKey = completion_key;
    for (const auto& hook : hooks) call(*hook, "completion", args);
  }
}

// Threads of this process that run abort hooks after a failure.
struct Running {
  std::mutex mutex;
  std::condition_variable ended;
  unsigned generation = fork_generation();
  int count = 0;
};
Running& running() {
  static Running* it = new Running;  // never destroyed: threads may outlive static destruction
  return *it;
}
void count_running(int change) {
  Running& it = running();
  std::lock_guard lock(it.mutex);
  if (it.generation != fork_generation()) it.count = 0;  // the parent's threads do not exist here
  it.generation = fork_generation();
  it.count += change;
  it.ended.notify_all();
}
constexpr std::chrono::seconds kPatience{120};  // torch writes its trace with symbols, which takes seconds

}  // namespace

Hooks::~Hooks() {
  if (fork_generation() == generation_) {
    end_thread(aborting_);
  } else {
    [[maybe_unused]] auto* of_the_parent = aborting_.release();
  }
}

template <typename Hook>
void Hooks::add(Table<Hook>& hooks, int64_t id, Hook hook, const char* kind) {
  const WithoutPythonLock no_python;
  auto kept = std::make_shared<const Hook>(std::move(hook));
  std::lock_guard lock(mutex_);
  if (!hooks.emplace(id, std::move(kept)).second)
    throw Error(ErrorKind::kValue, std::string("the number ") + std::to_string(id) + " is in use by another " + kind +
                                       " hook of this process group: unregister that first, or choose another");
  has_completion_hooks_ = !completion_hooks_.empty();
}

template <typename Hook>
void Hooks::remove(Table<Hook>& hooks, int64_t id, const char* kind) {
  const WithoutPythonLock no_python;
  typename Table<Hook>::node_type removed;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  removed = hooks.extract(id);
  if (removed.empty())
    throw Error(ErrorKind::kValue,
                std::string("this process group has no ") + kind + " hook with the number " + std::to_string(id));
  has_completion_hooks_ = !completion_hooks_.empty();
}

template <typename Hook>
std::vector<std::shared_ptr<const Hook>> Hooks::all(const Table<Hook>& hooks) const {
  std::vector<std::shared_ptr<const Hook>> out;
  std::lock_guard lock(mutex_);
  for (const auto& [id, hook] : hooks) out.push_back(hook);
  return out;
}

void Hooks::add_abort_hook(int64_t id, AbortHook hook) { add(abort_hooks_, id, std::move(hook), "abort"); }

void Hooks::remove_abort_hook(int64_t id) {
  const WithoutPythonLock no_python;
  remove(abort_hooks_, id, "abort");
  wait_for_abort_hooks();
}

void Hooks::add_completion_hook(int64_t id, CompletionHook hook) {
  add(completion_hooks_, id, std::move(hook), "completion");
}

void Hooks::remove_completion_hook(int64_t id) { remove(completion_hooks_, id, "completion"); }

void Hooks::run_abort_hooks() const {
  for (const auto& hook : all(abort_hooks_)) call(*hook, "abort");
}

void Hooks::run_completion_hooks(uint64_t completion_key) const {
  call_completion_hooks(all(completion_hooks_), completion_key);
}

// Called by the thread that drives the engine, which must not wait for Python.
void Hooks::on_failure() {
  std::lock_guard lock(mutex_);
  if (abort_hooks_.empty()) return;
  failed_again_ = aborting_now_;
  if (aborting_now_) return;
  end_thread(aborting_);  // it has ended
  aborting_now_ = true;
  count_running(1);
  try {
    aborting_ = start_thread("ringdp-abort", [this] {
      run_after_failure();
      count_running(-1);
    });
    aborting_id_ = aborting_->get_id();
  } catch (...) {
    count_running(-1);
    aborting_now_ = false;
    throw;
  }
}

void Hooks::run_after_failure() {
  for (;;) {
    run_abort_hooks();
    std::lock_guard ended(mutex_);
    if (std::exchange(failed_again_, false)) continue;
    aborting_now_ = false;
    aborting_id_ = {};
    aborting_ended_.notify_all();
    return;
  }
}

void Hooks::wait_for_abort_hooks() {
  if (fork_generation() != generation_) return;
  std::unique_ptr<std::thread> thread;
  {
    std::unique_lock lock(mutex_);
    if (aborting_id_ == std::this_thread::get_id()) return;
    aborting_ended_.wait(lock, [&] { return !aborting_now_; });
    thread = std::move(aborting_);
  }
  end_thread(thread);
}

void Hooks::wait_for_all_abort_hooks() {
  count_running(0);  // in a forked child there are none
  Running& it = running();
  std::unique_lock lock(it.mutex);
  if (!it.ended.wait_for(lock, kPatience, [&] { return it.count == 0; }))
    log(LogLevel::kError,
        "an abort hook has not ended in " + std::to_string(kPatience.count()) + " s: it is left behind");
}

}  // namespace ringdp
