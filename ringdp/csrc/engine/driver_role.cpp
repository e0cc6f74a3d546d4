#include "engine/driver_role.h"

#include <exception>
#include <utility>

namespace ringdp {
namespace {

constexpr auto kIdleLookPeriod = std::chrono::milliseconds(250);
constexpr auto kPendingCopiesPeriod = std::chrono::milliseconds(2);

}  // namespace

DriverRole::DriverRole(Poller& poller, std::function<Leftover()> leftover)
    : poller_(poller), leftover_(std::move(leftover)) {}

void DriverRole::take(MutexLock& lock) {
  assert(!held());
  holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  lock.unlock();
}

void DriverRole::leave(MutexLock& lock) {
  const Leftover left = leftover_();
  lock.lock();
  holder_.store({}, std::memory_order_relaxed);
  copies_began_ |= left.copies && !left_.copies;
  left_ = left;
  if (unfinished_ > 0 || left_.frames || copies_began_) work_to_do_.notify_one();
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

void DriverRole::operation_began(bool caller_waits) {
  ++unfinished_;
  if (held()) {
    if (sleeping_) poller_.wake();
  } else if (!caller_waits) {
    work_to_do_.notify_one();
  }
}

void DriverRole::operation_ended() {
  --unfinished_;
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
    auto wanted = [&]() RINGDP_NOT_CHECKED { return closed_ || (!held() && (busy() || copies_began_)); };
    const auto period = left_.copies && !held() ? kPendingCopiesPeriod : kIdleLookPeriod;
    const bool idle = !work_to_do_.wait_for(lock.native(), period, wanted);
    if (closed_) return Turn::kEnd;
    if (std::exchange(copies_began_, false) && !busy()) continue;  // from now on with the shorter period
    if (!held()) return idle ? Turn::kLook : Turn::kDrive;
    look_due_.store(true, std::memory_order_relaxed);
  }
}

void DriverRole::close() {
  closed_ = true;
  work_to_do_.notify_all();
}

}  // namespace ringdp
