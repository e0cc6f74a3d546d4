// DriverRole: which thread drives the engine, and how other threads wake it, wait for it and hand it requests. At most
// one thread holds the role at a time; it is passed on under `mutex()`, so the next holder sees the last one's writes.
// A member of the engine's parts that belongs to the driver is marked RINGDP_GUARDED_BY(role_); the methods that touch
// it assert that the calling thread holds the role (in builds with assertions; clang's -Wthread-safety checks the
// rest). Owned by the Engine and used by its parts. Any thread.
#pragma once

#include <atomic>
#include <cassert>
#include <condition_variable>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/thread_safety.h"
#include "transport/poller.h"

namespace ringdp {

class RINGDP_CAPABILITY("role") DriverRole {
 public:
  // Work that a leaving driver has not finished, besides operations in flight.
  struct Leftover {
    bool frames = false;  // waiting for room in a channel
    bool copies = false;  // to or from a device, of operations that are over; or a failure that others may explain
  };

  // `poller`: the driver sleeps in it; closed under the mutex. `watcher`: has the same channels; the communication
  // thread waits in it without the role, and nothing is taken from it but its events. `leftover`: called by a driver
  // that leaves; `watched`: the communication thread waits in the watcher.
  DriverRole(Poller& poller, Poller& watcher, std::function<Leftover(bool watched)> leftover);

  // Guards the members for any thread. Locked before the mutexes of GroupTable and of the poller.
  Mutex& mutex() const RINGDP_RETURNS(mutex_) { return mutex_; }

  bool held_here() const { return holder_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  void assert_held() const RINGDP_ASSERTS(this) { assert(held_here()); }
  bool held() const RINGDP_REQUIRES(mutex_) { return holder_.load(std::memory_order_relaxed) != std::thread::id(); }

  // Runs `action` as the driver, without the mutex. No thread may hold the role.
  template <typename Action>
  void drive(MutexLock& lock, Action&& action) RINGDP_REQUIRES(mutex_) {
    take(lock);
    struct Leaving {
      DriverRole& role;
      MutexLock& lock;
      ~Leaving() { role.leave(lock); }
    } leaving{*this, lock};
    action();
  }
  // Runs `action` while no other thread drives: at once if none does, else in the driver's next round
  // (`take_requests`). Returns after it has run, or throws its exception.
  void run(const std::function<void()>& action);
  std::vector<std::function<void()>> take_requests() RINGDP_REQUIRES(mutex_) {
    submitted_ = false;
    return std::exchange(requests_, {});
  }

  // Waits, for `most` at most, until an operation has ended or the role is free. False: neither happened.
  bool wait_for_change(MutexLock& lock, Clock::duration most) RINGDP_REQUIRES(mutex_);

  // Operations in flight. `caller_waits`: the calling thread drives next unless another one does, so no thread is
  // woken. `rests`: it may stay pending for long, and needs a driver only when bytes come.
  void operation_began(bool caller_waits, bool rests) RINGDP_REQUIRES(mutex_);
  void operation_ended(bool rests) RINGDP_REQUIRES(mutex_);

  void wake() RINGDP_REQUIRES(mutex_) {
    if (sleeping_) poller_.wake();
  }

  // Announces that the driver will sleep in the poller, so that requests wake it. False: there are requests, do not
  // sleep.
  bool begin_sleep() RINGDP_REQUIRES(mutex_);
  void end_sleep() RINGDP_REQUIRES(mutex_) { sleeping_ = false; }

  // For the communication thread: waits until there is work and no driver.
  enum class Turn {
    kDrive,  // there is work: drive until none is left
    kWatch,  // there are resting operations only: look for events, then `watch`
    kLook,   // no work: look once at all links
    kEnd     // the engine is closed
  };
  Turn wait_for_turn(MutexLock& lock) RINGDP_REQUIRES(mutex_);
  // Of the communication thread, after its look for events: waits for the next one without the role, which other
  // threads take and leave meanwhile. Returns at once where that look has left work.
  void watch(MutexLock& lock) RINGDP_REQUIRES(mutex_);
  void stop_watching() RINGDP_REQUIRES(mutex_);
  void will_watch() RINGDP_REQUIRES(this) { watched_.store(true, std::memory_order_relaxed); }
  // The driver should look at all links once.
  bool look_due() const { return look_due_.load(std::memory_order_relaxed); }
  void looked() { look_due_.store(false, std::memory_order_relaxed); }

  void close(MutexLock& lock) RINGDP_REQUIRES(mutex_);  // also the pollers
  bool closed() const RINGDP_REQUIRES(mutex_) { return closed_; }

 private:
  void take(MutexLock& lock) RINGDP_NOT_CHECKED;   // called with the lock, returns without it
  void leave(MutexLock& lock) RINGDP_NOT_CHECKED;  // called without the lock, returns with it

  Poller& poller_;
  Poller& watcher_;
  const std::function<Leftover(bool watched)> leftover_;
  // written under the mutex; without it a thread may only compare it with its own id
  std::atomic<std::thread::id> holder_{};
  std::atomic<bool> look_due_{false};
  std::atomic<bool> watched_{false};  // set with the role, cleared with the mutex, by the communication thread

  mutable Mutex mutex_;
  std::condition_variable work_to_do_;               // for the communication thread
  std::condition_variable changed_;                  // for threads that wait and do not drive
  int waiting_ RINGDP_GUARDED_BY(mutex_) = 0;        // threads on `changed_`
  bool sleeping_ RINGDP_GUARDED_BY(mutex_) = false;  // the driver, in the poller or about to be
  bool closed_ RINGDP_GUARDED_BY(mutex_) = false;
  std::size_t unfinished_ RINGDP_GUARDED_BY(mutex_) = 0;  // operations, without those that rest
  std::size_t resting_ RINGDP_GUARDED_BY(mutex_) = 0;
  bool submitted_ RINGDP_GUARDED_BY(mutex_) = false;         // operations that no driver has taken
  Clock::time_point looked_at_ RINGDP_GUARDED_BY(mutex_){};  // when the communication thread last asked for a look
  Leftover left_ RINGDP_GUARDED_BY(mutex_);                  // by the last driver
  bool copies_began_ RINGDP_GUARDED_BY(mutex_) = false;      // since the communication thread last looked
  bool idles_ RINGDP_GUARDED_BY(mutex_) = false;             // the communication thread: it knows of no resting one
  std::vector<std::function<void()>> requests_ RINGDP_GUARDED_BY(mutex_);  // for the driver
};

}  // namespace ringdp
