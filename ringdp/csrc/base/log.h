// Log lines of the core, for the sink that was set (Python's logging in a module, stderr in C++ tests).
// Any thread; the sink must not call back into ringdp.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace ringdp {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

using LogSink = std::function<void(LogLevel, const std::string&)>;

void set_log_sink(LogSink sink);  // an empty one drops everything (the start)
void log(LogLevel level, const std::string& text);

// NoticeBoard: log lines of the thread that drives the engine. A thread of its own writes them, because the sink may be
// Python's and wait for Python's lock, which a stuck program never releases. The thread starts with the first line.
// Owned by the engine, which calls `stop` and `join`; `post` from any thread.
class NoticeBoard {
 public:
  NoticeBoard();

  void post(LogLevel level, std::string text);  // dropped after `stop`, or if a hundred are queued
  void stop();                                  // queued lines are still written
  void join();

 private:
  struct State;
  static void write(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // also held by the thread
  std::unique_ptr<std::thread> thread_;
};

}  // namespace ringdp
