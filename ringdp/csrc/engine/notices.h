// NoticeBoard: log lines of the thread that drives the engine. A thread of its own writes them, because the sink may be
// Python's and wait for Python's lock, which a stuck program never releases. The thread starts with the first line.
// Owned by the engine, which calls `stop` and `join`; `post` from any thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/log.h"

namespace ringdp {

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
