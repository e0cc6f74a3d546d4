// NoticeBoard: log lines of the thread that drives the engine. They are written by a thread of their own, because the
// sink may be Python's and wait for Python's lock, which a stuck program never lets go. The thread starts with the first
// line. `post` from any thread; the owner calls `stop` and `join`.
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

  void post(LogLevel level, std::string text);  // dropped after `stop`, or when a hundred wait
  void stop();                                  // what waits is still written
  void join();

 private:
  struct State;
  static void write(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // also held by the thread
  std::unique_ptr<std::thread> thread_;
};

}  // namespace ringdp
