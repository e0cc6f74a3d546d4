#include "engine/job_thread.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "base/thread.h"

namespace ringdp {
namespace {

constexpr std::size_t kMostWaiting = 64;

}  // namespace

struct JobThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  bool stopped = false;
};

JobThread::JobThread(const char* name) : name_(name), state_(std::make_shared<State>()) {}

void JobThread::run(std::function<void()> job) {
  std::lock_guard lock(state_->mutex);
  if (state_->stopped || state_->jobs.size() >= kMostWaiting) return;
  state_->jobs.push_back(std::move(job));
  state_->changed.notify_one();
  if (thread_) return;
  try {
    thread_ = start_thread(name_, [state = state_] { work(state); });
  } catch (const Error&) {
    state_->jobs.clear();
  }
}

void JobThread::stop() {
  std::lock_guard lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_one();
}

void JobThread::join() { end_thread(thread_); }

void JobThread::work(const std::shared_ptr<State>& owned) {
  std::shared_ptr<State> state = owned;
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->stopped || !state->jobs.empty(); });
    if (state->jobs.empty()) return;
    std::function<void()> job = std::move(state->jobs.front());
    state->jobs.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

}  // namespace ringdp
