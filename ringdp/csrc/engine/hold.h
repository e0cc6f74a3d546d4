// CallbackHold: what follows the operations that a thread issues while the hold lives does not begin before its end.
// torch runs a callback that is attached to a complete future at once, on the thread that attaches it; a collective in it
// would then be numbered as that thread's own, not as the callback's, on some ranks and not on others. Who lets user code
// issue operations and attach callbacks to them (communication hooks) holds them for that long. Thread-local, like names.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

namespace ringdp {

class CallbackHold {
 public:
  CallbackHold();
  ~CallbackHold();
  CallbackHold(const CallbackHold&) = delete;
  CallbackHold& operator=(const CallbackHold&) = delete;

  class State {  // shared by the hold and by what waits for its end
   public:
    void release();
    void wait();  // a second at most: user code may be waiting for a future itself

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool over_ = false;
  };

  static const std::shared_ptr<State>& current();  // null where nothing is held

 private:
  std::shared_ptr<State> outer_;
};

}  // namespace ringdp
