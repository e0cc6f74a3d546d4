// CompletionQueue: runs what is to happen after operations (futures' callbacks, which may take Python's lock or wait for
// further operations) one after the other on a thread of its own, so that nothing of it can stop the network.
// `push` from any thread. An operation issued inside a callback asks `nested_key` for its number: ranks run callbacks at
// different moments, so such operations are matched by (number of the operation called back for, index within it).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

namespace ringdp {

class CompletionQueue {
 public:
  void push(uint64_t group, uint64_t sequence, std::function<void()> job);
  void run();  // the thread's body; returns after `stop`, when the queue is empty
  void stop();

  // On the completion thread, inside a callback: the next number for an operation in `group`. nullopt elsewhere.
  static std::optional<uint64_t> nested_key(uint64_t group);

  static bool on_this_thread();  // inside a callback

  static constexpr uint64_t kNestedBit = 1ULL << 63;

 private:
  struct Job {
    uint64_t group;
    uint64_t sequence;
    std::function<void()> run;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool stopped_ = false;
};

}  // namespace ringdp
