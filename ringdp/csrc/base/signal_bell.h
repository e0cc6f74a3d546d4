// SignalBell: wakes a thread when a signal asks this process for a dump. Signals: SIGUSR1, where it had no handler
// when the first bell was made, and a real-time signal, for `python -m ringdp dump`. Handlers that were there stay,
// and a script that sets one for SIGUSR1 later replaces ours. A forked child's signals do nothing. Owned by the thread
// that waits; `ring` from any thread.
#pragma once

namespace ringdp {

// The real-time signal that asks for a dump.
int dump_signal();

class SignalBell {
 public:
  // `signals`: it hears them; otherwise `ring` alone.
  explicit SignalBell(bool signals);
  ~SignalBell();
  SignalBell(const SignalBell&) = delete;
  SignalBell& operator=(const SignalBell&) = delete;

  void ring();
  // Returns after each `ring` or signal. True: it was a signal.
  bool wait();
  // False: the script has a handler of its own for SIGUSR1.
  static bool hears_user_signal();

 private:
  int place_ = -1;  // of a fixed number, which handlers may look at at any time; -1: all are taken, and `wait` polls
  const bool signals_;
};

}  // namespace ringdp
