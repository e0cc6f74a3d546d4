// Fd owns one file descriptor and closes it. Every descriptor of ringdp lives in one. A process-wide registry (the one
// global that is allowed) lists all open ones, so that a forked child, for example a data-loader worker, closes its
// copies at once. Otherwise a dead rank's sockets would stay open in its children, and its peers would not notice the
// death. Any thread; one Fd is used by one thread at a time.
#pragma once

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

}  // namespace ringdp
