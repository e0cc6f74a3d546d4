// CompletionQueue: runs the callbacks of operations one after the other on a thread of its own, because a callback may
// take Python's lock or wait for further operations, and must not stop the network. Owned by the engine; `push` from
// any thread. An operation issued inside a callback gets its number from `nested_key`: ranks run callbacks at
// different times, so such operations are matched by (number of the callback's operation, index within the callback).
// The callbacks of such an operation run on another thread, the next lane's, because the first callback may wait for
// them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>

namespace ringdp {

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
