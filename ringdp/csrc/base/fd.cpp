#include "base/fd.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
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

ssize_t send_with_descriptor(int socket, std::span<const std::byte> bytes, const Fd& descriptor) {
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (descriptor) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    int sent = descriptor.get();
    std::memcpy(CMSG_DATA(rights), &sent, sizeof(sent));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t receive_with_descriptor(int socket, std::span<std::byte> bytes, Fd& descriptor) {
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control;
  iovec piece{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got <= 0) return got;
  for (cmsghdr* it = CMSG_FIRSTHDR(&message); it != nullptr; it = CMSG_NXTHDR(&message, it)) {
    if (it->cmsg_level != SOL_SOCKET || it->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; CMSG_LEN(at + sizeof(int)) <= it->cmsg_len; at += sizeof(int)) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(it) + at, sizeof(received));
      descriptor = Fd(received);
    }
  }
  return got;
}

}  // namespace ringdp
