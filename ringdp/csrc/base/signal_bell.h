// SignalBell: wakes a thread when a signal asks this process for a dump. Signals: SIGUSR1, where it had no handler
// when the first bell was made, and a real-time signal, for `python -m ringdp dump`. Existing handlers stay, and a
// script that sets one for SIGUSR1 later replaces ours. In a forked child the signals do nothing. Owned by the thread
// that waits; `ring` from any thread.
#pragma once

namespace ringdp {

// The real-time signal that asks for a dump.
int dump_signal();

class SignalBell {
 public:
  // With `signals`, both signals wake it; otherwise only `ring` does.
  explicit SignalBell(bool signals);
  ~SignalBell();
  SignalBell(const SignalBell&) = delete;
  SignalBell& operator=(const SignalBell&) = delete;

  void ring();
  // Returns after each `ring` or signal. True: it was a signal.
  bool wait();
  // False: the script has a handler of its own for SIGUSR1.
  static bool handles_user_signal();

 private:
  // in a table of fixed size, which handlers may read at any time; -1: the table is full, and `wait` polls
  int place_ = -1;
  const bool signals_;
};

}  // namespace ringdp
