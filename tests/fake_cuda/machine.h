// Machine: what a CUDA device that is not there does: its streams and its memory.
// A stream is a queue of tasks. One thread works the streams off, in an order drawn from a seed and with pauses; or
// lazily, which is as late as can be: only what the host asks for, and what that waits for. A task that waits for other
// processes runs on a thread of its own, so that it holds up its stream and no other. A block of memory has two
// addresses: the tensor's, which ends the process that reads there, and a twin at which tasks reach it. A block that is
// given back is the next one of its size or less on its stream, as by CUDA's caching allocator, so that who uses it too
// long is found.
// One for each process, never destroyed; any thread. A process that has used it must not fork.
#pragma once

#include <c10/core/Stream.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace fake_cuda {

using c10::StreamId;

// What a stream had to do when an event was recorded on it.
struct Mark {
  bool reached = false;
  StreamId stream = 0;
};
using MarkPointer = std::shared_ptr<Mark>;

class Machine {
 public:
  static Machine& here();

  // ---- Streams
  void queue(StreamId stream, std::function<void()> work);
  void queue_apart(StreamId stream, std::function<void()> work);  // it may wait for other processes
  void queue_wait(StreamId stream, MarkPointer mark);             // what is queued behind it does not run before
  void queue_rest(StreamId stream, std::chrono::microseconds time);
  MarkPointer record(StreamId stream);
  bool reached(const MarkPointer& mark);
  void wait_for(const MarkPointer& mark);
  bool idle(StreamId stream);
  void wait_for_stream(StreamId stream);
  void wait_for_all();
  StreamId next_stream();
  // Pauses of up to so many us, in an order drawn from the seed; negative: lazily.
  void set_order(uint64_t seed, int longest_us);
  // The host waits for the device inside an operator: an error while that is forbidden.
  void note_wait() const;
  void forbid_waits(bool forbidden) { waits_forbidden_.store(forbidden); }
  // While true each record of an event and each launch fails, as after an assert in a kernel.
  void fail(bool failed) { failed_.store(failed); }
  bool has_failed() const { return failed_.load(); }
  void throw_if_failed() const;

  // ---- Memory
  void* allocate(std::size_t bytes, StreamId stream);
  void note_use(const void* address, StreamId stream);  // the block is not given out again before that stream is here
  void release(void* block);
  template <class T>
  T* twin(T* address) const {
    if (address == nullptr) return nullptr;
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(twin_ - base_));
  }

  // The same of an address in that memory; any other number stays what it is.
  uintptr_t mapped(uintptr_t number) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Task {
    std::function<void()> run;
    bool apart = false;
    MarkPointer waits, reaches;
    Clock::duration rest{};
    Clock::time_point rests_until{};
  };
  struct Block {
    std::size_t bytes;
    StreamId stream;
    std::set<StreamId> users;
  };

  Machine() = default;
  void add(StreamId stream, Task task);
  void map();
  void give_back(void* block, const Block& what);
  void run();
  void begin(StreamId stream, Task task);
  void finish(StreamId stream, const Task& task);
  std::set<StreamId> wanted();
  std::vector<StreamId> ready(bool& resting);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<StreamId, std::deque<Task>> queues_;
  std::map<StreamId, std::size_t> pending_;
  std::set<StreamId> busy_;  // with a task that runs apart
  std::mt19937_64 random_{1};
  int longest_us_ = 0;
  bool lazy_ = true;
  std::set<MarkPointer> asked_;
  std::map<StreamId, int> awaited_;
  int all_awaited_ = 0;
  std::unique_ptr<std::thread> thread_;
  std::atomic<StreamId> next_{0};
  std::atomic<bool> waits_forbidden_{false}, failed_{false};

  std::mutex memory_mutex_;
  pid_t owner_ = 0;
  std::byte* base_ = nullptr;
  std::byte* twin_ = nullptr;
  std::size_t used_ = 0;
  std::map<std::pair<StreamId, std::size_t>, std::vector<void*>> free_;
  std::map<const void*, Block> blocks_;
};

// Of this thread.
StreamId current_stream();
StreamId exchange_stream(StreamId stream);

}  // namespace fake_cuda
