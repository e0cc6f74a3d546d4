// Inbox: what other threads hand to one that waits for descriptors, and the order to stop. Invariant: its descriptor
// is readable once there is something to take. Owned by whatever owns the thread; `add` and `stop` are for any thread,
// the rest for that one.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <list>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/fd.h"

namespace ringdp {

template <class Item>
class Inbox {
 public:
  Inbox() : bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!bell_) throw_system("eventfd", errno);
  }

  void add(Item item) {
    std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
    ring();
  }
  void stop() {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    ring();
  }

  int fd() const { return bell_.get(); }
  // Appends what has come; their places in memory stay. False: the thread is to stop.
  bool take(std::list<Item>& to) {
    uint64_t rung = 0;  // read before: what is added later rings again
    [[maybe_unused]] const ssize_t got = ::read(bell_.get(), &rung, sizeof(rung));
    std::lock_guard lock(mutex_);
    to.splice(to.end(), items_);
    return !stopping_;
  }

 private:
  void ring() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(bell_.get(), &one, sizeof(one));
  }

  const Fd bell_;
  std::mutex mutex_;  // guards the members below
  std::list<Item> items_;
  bool stopping_ = false;
};

}  // namespace ringdp
