// Fd owns one file descriptor and closes it. Every descriptor of ringdp lives in one. All open ones are listed in a
// process-wide registry (the one allowed global, DESIGN.md) so that a forked child, a data-loader worker say, closes
// its copies at once: otherwise a dead rank's sockets would stay open in its children and its peers would not notice
// the death. Any thread; one Fd is used by one thread at a time.
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

// How often this process image was forked since the registry was made: an object that remembers the value it was born
// with can tell that it now lives in a child, where its threads and descriptors do not exist.
unsigned fork_generation() noexcept;

}  // namespace ringdp
