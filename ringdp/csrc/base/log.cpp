#include "base/log.h"

#include <mutex>
#include <utility>

#include "base/thread.h"

namespace ringdp {
namespace {

struct Slot {
  std::mutex mutex;
  LogSink sink;
};

Slot& slot() {
  static Slot* instance = new Slot;
  return *instance;
}

}  // namespace

void set_log_sink(LogSink sink) {
  std::lock_guard lock(slot().mutex);
  slot().sink = std::move(sink);
}

void log(LogLevel level, const std::string& text) {
  LogSink sink;
  {
    std::lock_guard lock(slot().mutex);
    sink = slot().sink;
  }
  if (sink) sink(level, text);
}

namespace {

constexpr std::size_t kMostWaiting = 100;

}  // namespace

struct NoticeBoard::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<LogLevel, std::string>> lines;
  bool stopped = false;
};

NoticeBoard::NoticeBoard() : state_(std::make_shared<State>()) {}

void NoticeBoard::post(LogLevel level, std::string text) {
  std::lock_guard lock(state_->mutex);
  if (state_->stopped || state_->lines.size() >= kMostWaiting) return;
  state_->lines.emplace_back(level, std::move(text));
  state_->changed.notify_one();
  if (thread_) return;
  try {
    thread_ = start_thread("ringdp-notes", [state = state_] { write(state); });
  } catch (const Error&) {
    // No thread can be started: the line is written by the thread of a later one. A notice must not fail an operation.
  }
}

void NoticeBoard::stop() {
  std::lock_guard lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_one();
}

void NoticeBoard::join() { end_thread(thread_); }  // stopped: no thread is started from now on

void NoticeBoard::write(const std::shared_ptr<State>& owned) {
  std::shared_ptr<State> state = owned;
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->stopped || !state->lines.empty(); });
    if (state->lines.empty()) return;
    auto [level, text] = std::move(state->lines.front());
    state->lines.pop_front();
    lock.unlock();
    log(level, text);
    lock.lock();
  }
}

}  // namespace ringdp
