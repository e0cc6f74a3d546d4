// JobThread: runs jobs one after the other on a thread of its own, which starts with the first. Owned by a Diagnosis,
// which calls `stop` and `join`; `run` from any thread. A job is dropped if no thread can be started, or too many are
// queued: a diagnosis must not fail an operation.
#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace ringdp {

class JobThread {
 public:
  explicit JobThread(const char* name);

  void run(std::function<void()> job);
  void stop();  // queued jobs still run
  void join();

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);

  const char* const name_;
  std::shared_ptr<State> state_;  // also held by the thread
  std::unique_ptr<std::thread> thread_;
};

}  // namespace ringdp
