// CompletionQueue: runs the callbacks of operations one after the other on a thread of its own, because a callback may
// take Python's lock or wait for further operations, and must not stop the network. Owned by the engine; `push` from
// any thread. An operation issued inside a callback gets its number from `nested_key`: ranks run callbacks at
// different times, so such operations are matched by (number of the callback's operation, index within the callback).
// The callbacks of such an operation run on another thread, the next lane's, because the first callback may wait for
// them.
//
// CallbackGate: while a thread has one, the callbacks of the operations that the thread issues do not run; they run
// after its destruction. torch runs a callback that is attached to a complete future at once, on the thread that
// attaches it; a collective in it would then be numbered as that thread's own, not as the callback's, and only on some
// ranks. So the reducer keeps a gate closed while user code (a communication hook) issues operations and attaches
// callbacks to them. A local variable of the issuing thread; gates nest. Thread-local, like names.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

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

class CompletionQueue {
 public:
  CompletionQueue();

  void push(int lane, uint64_t group, uint64_t sequence, std::function<void()> job);
  void run();   // the body of lane 0's thread; returns after `stop`, when the queue is empty
  void stop();  // no further lane starts
  void join();  // joins the other lanes' threads; lane 0's belongs to the owner

  struct Nested {
    uint64_t callback;  // path of the callback that issues the operation
    uint64_t sequence;
  };
  // Inside a callback: the next number for an operation in `group`. nullopt elsewhere.
  static std::optional<Nested> nested_key(uint64_t group);

  static int current_lane();                                // of the callback that runs on this thread; -1 outside
  static int issuing_lane() { return current_lane() + 1; }  // of the callbacks of operations issued here

  // The root of the paths of all callbacks after an operation.
  static uint64_t path_of(uint64_t group, uint64_t sequence);

 private:
  struct State;
  static void run_lane(const std::shared_ptr<State>& state, std::size_t lane);

  std::shared_ptr<State> state_;  // also held by the lanes' threads, one of which may drop this queue's owner
};

// CallbackScope: while it exists, operations that this thread issues belong to the callback with this path. A callback
// that is attached to a complete future runs at once on the attaching thread, on other ranks on a lane's thread.
// `path`: unique for the callback, the same on all ranks. `lane`: of the callback's operation.
class CallbackScope {
 public:
  CallbackScope(uint64_t path, int lane);
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

 private:
  friend class CompletionQueue;

  const uint64_t path_;
  const int lane_;
  CallbackScope* const outer_;
  std::map<uint64_t, uint64_t> issued_;  // operations so far, by group
};

}  // namespace ringdp
