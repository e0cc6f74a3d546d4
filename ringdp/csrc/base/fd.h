// Fd owns one file descriptor and closes it. Every descriptor of ringdp lives in one. A process-wide registry (the one
// global that is allowed) lists all open ones, so that a forked child, for example a data-loader worker, closes its
// copies at once. Otherwise a dead rank's sockets would stay open in its children, and its peers would not notice the
// death. Any thread; one Fd is used by one thread at a time.
//
// Bytes on a Unix stream socket with a descriptor beside them (SCM_RIGHTS, unix(7)). Neither blocks nor raises
// SIGPIPE; results and errno are those of sendmsg(2) and recvmsg(2). Any thread, one per socket and direction.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>

namespace ringdp {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);  // takes ownership
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int release() noexcept;  // stays registered: only for moves

  int fd_ = -1;
};

// The number of forks between the making of the registry and this process. An object that keeps the value from its
// construction can tell that it is now in a child, where its threads and descriptors do not exist.
unsigned fork_generation() noexcept;

ssize_t send_with_descriptor(int socket, std::span<const std::byte> bytes, const Fd& descriptor);  // may be empty

// A received descriptor replaces `descriptor`; of several the last one does, and the others are closed.
ssize_t receive_with_descriptor(int socket, std::span<std::byte> bytes, Fd& descriptor);

}  // namespace ringdp
