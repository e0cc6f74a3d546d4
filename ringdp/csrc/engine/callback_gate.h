// CallbackGate: while a thread has one, the callbacks of the operations that the thread issues do not run; they run
// after its destruction. torch runs a callback that is attached to a complete future at once, on the thread that
// attaches it; a collective in it would then be numbered as that thread's own, not as the callback's, and only on some
// ranks. So the reducer keeps a gate closed while user code (a communication hook) issues operations and attaches
// callbacks to them. A local variable of the issuing thread; gates nest. Thread-local, like names.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

namespace ringdp {

class CallbackGate {
 public:
  CallbackGate();
  ~CallbackGate();
  CallbackGate(const CallbackGate&) = delete;
  CallbackGate& operator=(const CallbackGate&) = delete;

  // Once open, it stays open.
  class State {  // shared by the gate and the callbacks that wait for it
   public:
    void release();
    void wait();  // at most a second: the user code may wait for a future

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool over_ = false;
  };

  static const std::shared_ptr<State>& current();  // this thread's; null if it has none

 private:
  std::shared_ptr<State> outer_;
};

}  // namespace ringdp
