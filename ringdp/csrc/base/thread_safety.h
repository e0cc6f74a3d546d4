// Which lock guards which member, in a form that clang's -Wthread-safety checks; other compilers skip it. Mutex and
// MutexLock are std::mutex and std::unique_lock with these annotations, which libstdc++'s own classes lack.
#pragma once

#include <mutex>

#if defined(__clang__)
#define RINGDP_ATTRIBUTE(it) __attribute__((it))
#else
#define RINGDP_ATTRIBUTE(it)
#endif

#define RINGDP_CAPABILITY(name) RINGDP_ATTRIBUTE(capability(name))
#define RINGDP_SCOPED_CAPABILITY RINGDP_ATTRIBUTE(scoped_lockable)
#define RINGDP_GUARDED_BY(it) RINGDP_ATTRIBUTE(guarded_by(it))
#define RINGDP_REQUIRES(...) RINGDP_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define RINGDP_ACQUIRE(...) RINGDP_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RINGDP_RELEASE(...) RINGDP_ATTRIBUTE(release_capability(__VA_ARGS__))
#define RINGDP_ASSERTS(it) RINGDP_ATTRIBUTE(assert_capability(it))
#define RINGDP_RETURNS(it) RINGDP_ATTRIBUTE(lock_returned(it))
#define RINGDP_NOT_CHECKED RINGDP_ATTRIBUTE(no_thread_safety_analysis)

namespace ringdp {

class RINGDP_CAPABILITY("mutex") Mutex {
 public:
  void lock() RINGDP_ACQUIRE() { mutex_.lock(); }
  void unlock() RINGDP_RELEASE() { mutex_.unlock(); }
  void assert_held() const RINGDP_ASSERTS(this) {}  // for clang, where the caller holds it under another name

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

class RINGDP_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) RINGDP_ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() RINGDP_RELEASE() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() RINGDP_ACQUIRE() { lock_.lock(); }
  void unlock() RINGDP_RELEASE() { lock_.unlock(); }
  std::unique_lock<std::mutex>& native() { return lock_; }  // for condition variables

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace ringdp
