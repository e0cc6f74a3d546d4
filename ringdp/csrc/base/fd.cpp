#include "base/fd.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace ringdp {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<int> open;
  std::atomic<unsigned> generation{0};

  Registry() {
    pthread_atfork([] { Registry::get().mutex.lock(); }, [] { Registry::get().mutex.unlock(); },
                   [] { Registry::get().close_in_child(); });
  }

  static Registry& get() {
    static Registry* registry = new Registry;  // never destroyed: descriptors may outlive static destruction
    return *registry;
  }

  void add(int fd) {
    std::lock_guard lock(mutex);
    open.push_back(fd);
  }

  void close_and_remove(int fd) {
    std::lock_guard lock(
        mutex);  // closed under the lock: otherwise a fork in between could close another descriptor of that number
    auto it = std::find(open.begin(), open.end(), fd);
    if (it == open.end()) return;  // a child already closed it
    open.erase(it);
    ::close(fd);
  }

  // Runs between fork and the child's first instruction: async-signal-safe calls only.
  void close_in_child() {
    for (int fd : open) ::close(fd);
    open.clear();
    generation.fetch_add(1, std::memory_order_relaxed);
    mutex.unlock();
  }
};

}  // namespace

Fd::Fd(int fd) : fd_(fd) {
  if (fd_ >= 0) Registry::get().add(fd_);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

void Fd::reset() noexcept {
  if (fd_ >= 0) Registry::get().close_and_remove(fd_);
  fd_ = -1;
}

int Fd::release() noexcept {
  int fd = fd_;
  fd_ = -1;
  return fd;
}

unsigned fork_generation() noexcept { return Registry::get().generation.load(std::memory_order_relaxed); }

}  // namespace ringdp
