// The measured ceiling of a ring over TCP: float32 sums through two connected sockets of each rank, written for nothing
// but speed and compiled when the benchmark runs. No frames, no checksums, no healing, no errors: a rank that dies
// hangs the others. ceiling.py loads it.
//
// Reduce-scatter and all-gather are one stream to the right neighbour and one from the left: what arrives is added (or
// stored) and may be sent on at once, byte by byte, so that nobody waits for whole chunks.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <memory>

namespace {

constexpr std::size_t kPieceFloats = 256 * 1024 / 4;  // taken from the kernel at a time, stays in the cache

struct Place {
  std::size_t from, length;  // in floats
};

// Where in the buffer the stream stands: chunk after chunk, each one left of the one before.
class Stream {
 public:
  Stream(std::size_t count, std::size_t ranks, std::size_t first_chunk)
      : count_(count), ranks_(ranks), chunk_(first_chunk) {}

  bool over() const { return step_ == 2 * (ranks_ - 1); }
  bool adds() const { return step_ < ranks_ - 1; }
  std::size_t passed() const { return passed_; }  // bytes
  std::size_t offset() const { return offset_; }  // bytes within the chunk
  Place chunk() const {
    std::size_t from = count_ * chunk_ / ranks_;
    return {from, count_ * (chunk_ + 1) / ranks_ - from};
  }
  void pass(std::size_t bytes) {
    passed_ += bytes;
    offset_ += bytes;
    skip();
  }
  // Past chunks without elements, too.
  void skip() {
    while (!over() && offset_ == chunk().length * 4) {
      offset_ = 0;
      chunk_ = (chunk_ + ranks_ - 1) % ranks_;
      ++step_;
    }
  }

 private:
  std::size_t count_, ranks_, chunk_;
  std::size_t step_ = 0, offset_ = 0, passed_ = 0;
};

// Of send(2) and recv(2); 0: it would block.
std::size_t moved(ssize_t result) {
  if (result > 0) return static_cast<std::size_t>(result);
  if (result == 0 || (errno != EAGAIN && errno != EINTR)) std::abort();
  return 0;
}

}  // namespace

extern "C" {

// In place; all ranks call it with the same `count`, in the same order. The sockets do not block.
void socket_ring_all_reduce(int right, int left, int rank, int ranks, float* data, std::size_t count) {
  static thread_local std::unique_ptr<float[]> piece(new float[kPieceFloats]);
  auto n = static_cast<std::size_t>(ranks), me = static_cast<std::size_t>(rank);
  Stream out(count, n, me), in(count, n, (me + n - 1) % n);
  std::size_t own = out.chunk().length * 4;  // may be sent before anything has come
  out.skip();
  in.skip();
  std::size_t held = 0;  // bytes of a float of which the rest has not come
  auto* bytes = reinterpret_cast<char*>(piece.get());
  while (!out.over() || !in.over()) {
    const bool sends = !out.over() && out.passed() < own + in.passed();
    std::size_t sent = 0, got = 0;
    if (sends) {
      Place at = out.chunk();
      std::size_t most = std::min(own + in.passed() - out.passed(), at.length * 4 - out.offset());
      auto* from = reinterpret_cast<const char*>(data + at.from) + out.offset();
      sent = moved(send(right, from, std::min(most, kPieceFloats * 4), MSG_NOSIGNAL));
      out.pass(sent);
    }
    if (!in.over()) {
      Place at = in.chunk();
      std::size_t wanted = at.length * 4 - in.offset();
      if (in.adds()) {
        float* to = data + at.from + in.offset() / 4;
        got = moved(recv(left, bytes + held, std::min(wanted, kPieceFloats * 4) - held, 0));
        std::size_t whole = (held + got) / 4;
        for (std::size_t i = 0; i < whole; ++i) to[i] += piece[i];
        held = held + got - whole * 4;
        std::copy_n(bytes + whole * 4, held, bytes);
        in.pass(whole * 4);
      } else {
        got = moved(recv(left, reinterpret_cast<char*>(data + at.from) + in.offset(), wanted, 0));
        in.pass(got);
      }
    }
    if (sent + got > 0) continue;
    pollfd fds[2] = {{in.over() ? -1 : left, POLLIN, 0}, {sends ? right : -1, POLLOUT, 0}};
    poll(fds, 2, -1);
  }
}
}
