// SlowDevice: takes the place of a device in tests, so that errors in the order of copies show on any machine. Its
// memory is ordinary memory; its copies run late and out of order, as a seed decides. The destination of a copy to the
// host is poison (all bits set: NaN) until the copy is done. A copy to the device takes its bytes at some moment
// before it completes, so host memory that is overwritten too early shows, too. Any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "device/copy_queue.h"

namespace ringdp {

class SlowDevice {
 public:
  explicit SlowDevice(uint64_t seed);
  ~SlowDevice();  // carries out what is still under way
  SlowDevice(const SlowDevice&) = delete;
  SlowDevice& operator=(const SlowDevice&) = delete;

  std::unique_ptr<CopyQueue> make_queue();  // may not outlive this
  void hold(bool still);                    // while true, no copy proceeds

 private:
  class Queue;
  struct Job {
    Queue* queue;
    CopyQueue::Ticket ticket;
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
    bool to_host;
    std::function<void()> work;    // instead of a copy
    std::vector<std::byte> taken;  // by a copy to the device, on its way
  };
  using Jobs = std::list<Job>;

  CopyQueue::Ticket add(Queue& queue, Job job);
  bool done(Queue& queue, CopyQueue::Ticket ticket);
  void await(Queue& queue);
  bool may_go(Jobs::iterator job);
  void go(std::unique_lock<std::mutex>& lock, Jobs::iterator job);
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  Jobs jobs_;  // in the order of the calls
  bool held_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ringdp
