#include "engine/driver_role.h"

#include <exception>
#include <utility>

namespace ringdp {
namespace {

constexpr auto kIdleLookPeriod = std::chrono::milliseconds(250);
constexpr auto kPendingCopiesPeriod = std::chrono::milliseconds(2);
// An event has come while another thread drove, which has seen it: the descriptors may stay readable until it leaves.
constexpr auto kWatchAgainPeriod = std::chrono::milliseconds(1);

}  // namespace

DriverRole::DriverRole(Poller& poller, Poller& watcher, std::function<Leftover(bool)> leftover)
    : poller_(poller), watcher_(watcher), leftover_(std::move(leftover)) {}

void DriverRole::take(MutexLock& lock) {
  assert(!held());
  holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  lock.unlock();
}

void DriverRole::leave(MutexLock& lock) {
  const Leftover left = leftover_(watched_.load(std::memory_order_relaxed));
  lock.lock();
  holder_.store({}, std::memory_order_relaxed);
  copies_began_ |= left.copies && !left_.copies;
  left_ = left;
  left_.frames |= submitted_;
  if (unfinished_ > 0 || left_.frames || copies_began_) {
    if (watched_.load(std::memory_order_relaxed))
      watcher_.wake();
    else
      work_to_do_.notify_one();
  }
  if (waiting_ > 0) changed_.notify_all();
}

void DriverRole::run(const std::function<void()>& action) {
  if (held_here()) return action();  // in a signal handler, while this thread drives
  MutexLock lock(mutex_);
  if (!held()) return drive(lock, action);
  bool done = false;
  std::exception_ptr failure;
  requests_.push_back([&] {
    try {
      action();
    } catch (...) {
      failure = std::current_exception();
    }
    MutexLock inner(mutex_);
    done = true;
    changed_.notify_all();
  });
  if (sleeping_) poller_.wake();
  ++waiting_;
  while (!done) {
    if (held()) {
      changed_.wait(lock.native());
      continue;
    }
    auto unseen = take_requests();  // that the last driver has not run
    drive(lock, [&] {
      for (auto& request : unseen) request();
    });
  }
  --waiting_;
  lock.unlock();
  if (failure) std::rethrow_exception(failure);
}

bool DriverRole::wait_for_change(MutexLock& lock, Clock::duration most) {
  ++waiting_;
  const auto status = changed_.wait_for(lock.native(), most);
  --waiting_;
  return status == std::cv_status::no_timeout;
}

void DriverRole::operation_began(bool caller_waits, bool rests) {
  ++(rests ? resting_ : unfinished_);
  submitted_ = true;
  if (held()) {
    wake();
  } else if (!caller_waits) {
    watched_.load(std::memory_order_relaxed) ? watcher_.wake() : work_to_do_.notify_one();
  }
  if (rests && idles_) work_to_do_.notify_one();
}

void DriverRole::operation_ended(bool rests) {
  --(rests ? resting_ : unfinished_);
  if (waiting_ > 0) changed_.notify_all();
}

bool DriverRole::begin_sleep() {
  if (!requests_.empty()) return false;
  return sleeping_ = true;
}

// While nothing is in flight the communication thread looks at the links at intervals: a peer may send a ping or a
// goodbye, or die.
DriverRole::Turn DriverRole::wait_for_turn(MutexLock& lock) {
  for (;;) {
    auto busy = [this]() RINGDP_NOT_CHECKED { return unfinished_ > 0 || left_.frames; };
    auto wanted = [&]() RINGDP_NOT_CHECKED {
      return closed_ || (!held() && (busy() || copies_began_)) || (resting_ > 0 && (idles_ || !held()));
    };
    Clock::duration period = kIdleLookPeriod;
    if (left_.copies && !held()) period = kPendingCopiesPeriod;
    if (resting_ > 0) period = kWatchAgainPeriod;
    idles_ = resting_ == 0;
    const bool idle = !work_to_do_.wait_for(lock.native(), period, wanted);
    idles_ = false;
    if (closed_) return Turn::kEnd;
    if (std::exchange(copies_began_, false) && !busy()) continue;  // from now on with the shorter period
    const auto now = Clock::now();
    const bool due = now - looked_at_ >= kIdleLookPeriod || (idle && resting_ == 0);
    if (held()) {
      if (due) look_due_.store(true, std::memory_order_relaxed);
    } else if (busy()) {
      return Turn::kDrive;
    }
    if (due) looked_at_ = now;
    if (held()) continue;
    if (due) return Turn::kLook;
    if (resting_ > 0) return Turn::kWatch;
  }
}

void DriverRole::watch(MutexLock& lock) {
  if (unfinished_ == 0 && !left_.frames && !closed_) {
    const auto most = left_.copies ? kPendingCopiesPeriod : kIdleLookPeriod;
    lock.unlock();
    watcher_.wait(static_cast<int>(std::chrono::milliseconds(most).count()));
    lock.lock();
  }
  stop_watching();
}

void DriverRole::stop_watching() {
  watched_.store(false, std::memory_order_relaxed);
  if (closed_) changed_.notify_all();
}

void DriverRole::close(MutexLock& lock) {
  closed_ = true;
  work_to_do_.notify_all();
  watcher_.wake();
  while (watched_.load(std::memory_order_relaxed)) changed_.wait(lock.native());
  poller_.close();
  watcher_.close();
}

}  // namespace ringdp
