#include "slow_device.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>

namespace ringdp {
namespace {

constexpr int kPoison = 0xff;
constexpr auto kLongestPause = std::chrono::microseconds(200);
constexpr unsigned kMostAtOnce = 6;  // steps between two pauses

bool overlap(const std::byte* a, std::size_t a_bytes, const std::byte* b, std::size_t b_bytes) {
  const std::less<> before;
  return before(a, b + b_bytes) && before(b, a + a_bytes);
}

}  // namespace

class SlowDevice::Queue final : public CopyQueue {
 public:
  explicit Queue(SlowDevice& device) : device_(device) {}
  ~Queue() override { device_.await(*this); }

  Ticket to_host(std::byte* host, const std::byte* device, std::size_t bytes) override {
    std::memset(host, kPoison, bytes);
    return device_.add(*this, {this, 0, host, device, bytes, true, {}, {}});
  }
  Ticket to_device(std::byte* device, const std::byte* host, std::size_t bytes) override {
    return device_.add(*this, {this, 0, device, host, bytes, false, {}, {}});
  }
  Ticket follow(std::function<void()> work) override {
    return device_.add(*this, {this, 0, nullptr, nullptr, 0, false, std::move(work), {}});
  }
  bool done(Ticket ticket) override { return device_.done(*this, ticket); }
  void after_caller() override {}  // what this thread did to the memory is done
  void after_all(const std::function<void()>& what) override {
    wait();
    what();
  }
  void order_caller() override { wait(); }
  void wait() override { device_.await(*this); }

  std::vector<bool> done_;  // by ticket; this and the error: the device's
  std::exception_ptr error_;

 private:
  SlowDevice& device_;
};

SlowDevice::SlowDevice(uint64_t seed) : random_(seed), thread_([this] { run(); }) {}

SlowDevice::~SlowDevice() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

std::unique_ptr<CopyQueue> SlowDevice::make_queue() { return std::make_unique<Queue>(*this); }

void SlowDevice::hold(bool still) {
  std::lock_guard lock(mutex_);
  held_ = still;
  changed_.notify_all();
}

CopyQueue::Ticket SlowDevice::add(Queue& queue, Job job) {
  std::lock_guard lock(mutex_);
  job.ticket = queue.done_.size();
  queue.done_.push_back(false);
  jobs_.push_back(std::move(job));
  changed_.notify_all();
  return queue.done_.size() - 1;
}

bool SlowDevice::done(Queue& queue, CopyQueue::Ticket ticket) {
  std::lock_guard lock(mutex_);
  if (queue.error_) std::rethrow_exception(queue.error_);
  return queue.done_[ticket];
}

void SlowDevice::await(Queue& queue) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return std::find(queue.done_.begin(), queue.done_.end(), false) == queue.done_.end(); });
}

// Nothing that was called before is still under way with the same memory, or has to come first.
bool SlowDevice::may_go(Jobs::iterator job) {
  return std::none_of(jobs_.begin(), job, [&](const Job& earlier) {
    if (earlier.queue != job->queue) return false;  // another operation's: the caller's business
    return earlier.work || job->work || overlap(earlier.to, earlier.bytes, job->to, job->bytes) ||
           overlap(earlier.to, earlier.bytes, job->from, job->bytes) ||
           overlap(earlier.from, earlier.bytes, job->to, job->bytes);
  });
}

// One step of it. What the job does to memory it does without the lock, as a device would.
void SlowDevice::go(std::unique_lock<std::mutex>& lock, Jobs::iterator job) {
  const bool takes = !job->work && !job->to_host && job->taken.empty();
  const bool once = random_() % 2 == 0;
  lock.unlock();
  std::exception_ptr error;
  if (job->work) {
    try {
      job->work();
    } catch (...) {
      error = std::current_exception();
    }
    job->work = [] {};  // what it holds goes here, without the lock
  } else if (job->to_host) {
    std::memcpy(job->to, job->from, job->bytes);
  } else {
    if (takes) job->taken.assign(job->from, job->from + job->bytes);
    if (!takes || once) std::memcpy(job->to, job->taken.data(), job->bytes);
  }
  lock.lock();
  if (takes && !once) return;
  if (error) job->queue->error_ = error;
  job->queue->done_[job->ticket] = true;
  jobs_.erase(job);
  changed_.notify_all();
}

void SlowDevice::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || (!jobs_.empty() && !held_); });
    if (stopping_ && jobs_.empty()) return;
    if (!stopping_) {
      const auto pause = std::chrono::microseconds(random_() % kLongestPause.count());
      lock.unlock();
      std::this_thread::sleep_for(pause);
      lock.lock();
    }
    for (auto steps = 1 + random_() % kMostAtOnce; steps > 0 && !jobs_.empty() && (stopping_ || !held_); --steps) {
      std::vector<Jobs::iterator> ready;
      for (auto job = jobs_.begin(); job != jobs_.end() && ready.size() < 32; ++job)
        if (may_go(job)) ready.push_back(job);
      go(lock, ready[random_() % ready.size()]);
    }
  }
}

}  // namespace ringdp
