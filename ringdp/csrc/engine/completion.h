// CompletionQueue: runs what is to happen after operations (futures' callbacks, which may take Python's lock or wait for
// further operations) one after the other on a thread of its own, so that nothing of it can stop the network.
// `push` from any thread. An operation issued inside a callback asks `nested_key` for its number: ranks run callbacks at
// different moments, so such operations are matched by (number of the operation called back for, index within it).
// What follows such an operation has its turn on another thread, the next lane's: the callback may be waiting for it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace ringdp {

class CompletionQueue {
 public:
  CompletionQueue();

  void push(int lane, uint64_t group, uint64_t sequence, std::function<void()> job);
  void run();   // the body of lane 0's thread; returns after `stop`, when the queue is empty
  void stop();  // then no further lane begins
  void join();  // waits for the other lanes' threads; lane 0's is its owner's

  // Inside a callback: the next number for an operation in `group`. nullopt elsewhere.
  static std::optional<uint64_t> nested_key(uint64_t group);

  static int current_lane();                                // of the callback that runs on this thread; -1 outside
  static int issuing_lane() { return current_lane() + 1; }  // of what follows the operations issued here

  static constexpr uint64_t kNestedBit = 1ULL << 63;  // of the sequence number of an operation issued in a callback

 private:
  struct State;
  static void run_lane(const std::shared_ptr<State>& state, std::size_t lane);

  std::shared_ptr<State> state_;  // also held by the lanes' threads, one of which may drop this queue's owner
};

}  // namespace ringdp
