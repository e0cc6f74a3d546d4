#include "engine/completion.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include "base/bytes.h"
#include "base/log.h"
#include "base/thread.h"
#include "link/frame.h"

namespace ringdp {

namespace {

constexpr auto kLongest = std::chrono::seconds(1);

std::shared_ptr<CallbackGate::State>& current_gate() {
  thread_local std::shared_ptr<CallbackGate::State> state;
  return state;
}

}  // namespace

CallbackGate::CallbackGate() : outer_(std::exchange(current_gate(), std::make_shared<State>())) {}

CallbackGate::~CallbackGate() { std::exchange(current_gate(), std::move(outer_))->release(); }

const std::shared_ptr<CallbackGate::State>& CallbackGate::current() { return current_gate(); }

void CallbackGate::State::release() {
  std::lock_guard lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

void CallbackGate::State::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kLongest, [this] { return over_; });
}

namespace {

thread_local CallbackScope* current_scope = nullptr;

}  // namespace

CallbackScope::CallbackScope(uint64_t path, int lane) : path_(path), lane_(lane), outer_(current_scope) {
  current_scope = this;
}

CallbackScope::~CallbackScope() { current_scope = outer_; }

struct CompletionQueue::State {
  struct Job {
    uint64_t group;
    uint64_t sequence;
    std::function<void()> run;
  };
  struct Lane {
    std::deque<Job> jobs;
    std::condition_variable changed;
    std::unique_ptr<std::thread> thread;  // null for lane 0
  };

  std::mutex mutex;
  std::deque<Lane> lanes;  // grows at the end only: threads hold references
  bool stopped = false;
};

CompletionQueue::CompletionQueue() : state_(std::make_shared<State>()) { state_->lanes.emplace_back(); }

std::optional<CompletionQueue::Nested> CompletionQueue::nested_key(uint64_t group) {
  if (current_scope == nullptr) return std::nullopt;
  const uint64_t path = current_scope->path_;
  return Nested{path, hash_mix(path, ++current_scope->issued_[group]) | kCallbackBit};
}

uint64_t CompletionQueue::path_of(uint64_t group, uint64_t sequence) { return hash_mix(group, sequence); }

int CompletionQueue::current_lane() { return current_scope == nullptr ? -1 : current_scope->lane_; }

void CompletionQueue::push(int lane, uint64_t group, uint64_t sequence, std::function<void()> job) {
  auto index = static_cast<std::size_t>(lane);
  std::lock_guard lock(state_->mutex);
  while (state_->lanes.size() <= index && !state_->stopped) {
    std::size_t next = state_->lanes.size();  // published before the thread reads it
    auto thread = start_thread("ringdp-done", [state = state_, next] { run_lane(state, next); });
    state_->lanes.emplace_back().thread = std::move(thread);
  }
  if (state_->lanes.size() <= index) return;
  state_->lanes[index].jobs.push_back({group, sequence, std::move(job)});
  state_->lanes[index].changed.notify_one();
}

void CompletionQueue::stop() {
  std::lock_guard lock(state_->mutex);
  state_->stopped = true;
  for (State::Lane& lane : state_->lanes) lane.changed.notify_all();
}

void CompletionQueue::join() {
  for (State::Lane& lane : state_->lanes) end_thread(lane.thread);  // stopped: no lane is added from now on
}

void CompletionQueue::run() { run_lane(state_, 0); }

void CompletionQueue::run_lane(const std::shared_ptr<State>& owned, std::size_t index) {
  std::shared_ptr<State> state = owned;
  std::unique_lock lock(state->mutex);
  State::Lane& lane = state->lanes[index];
  for (;;) {
    lane.changed.wait(lock, [&] { return state->stopped || !lane.jobs.empty(); });
    if (lane.jobs.empty()) return;
    State::Job job = std::move(lane.jobs.front());
    lane.jobs.pop_front();
    lock.unlock();
    try {
      const CallbackScope scope(path_of(job.group, job.sequence), static_cast<int>(index));
      job.run();
    } catch (const std::exception& error) {
      log(LogLevel::kError, std::string("a callback after a collective failed: ") + error.what());
    }
    job.run = nullptr;  // its destructor may take other locks
    lock.lock();
  }
}

}  // namespace ringdp
