#include "transport/shm.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/stream_copy.h"
#include "transport/transport.h"

namespace ringdp {

namespace {

constexpr std::size_t kTimedBytes = 16 * 1024;  // shorter copies are not timed
constexpr double kSlowBytesPerNs = 4.0;         // 9 where the cores share a cache, 2.3 where they do not
constexpr int kSlowInARow = 8;                  // one slow copy is a thread that was interrupted
constexpr int kProbePeriod = 128;  // copies between two trials of the other way: costs below 10 % if that is slow

}  // namespace

void SlotWriter::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  const bool timed = bytes >= kTimedBytes;
  if (streams_ && !(timed && --until_probe_ <= 0)) return stream_copy(to, from, bytes);
  if (!timed) {
    std::memcpy(to, from, bytes);
    return;
  }
  auto begin = Clock::now();
  std::memcpy(to, from, bytes);
  auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
  judge(static_cast<double>(bytes) < kSlowBytesPerNs * static_cast<double>(ns));
}

void SlotWriter::judge(bool slow) {
  slow_in_a_row_ = slow ? slow_in_a_row_ + 1 : 0;
  streams_ = slow && (streams_ || slow_in_a_row_ >= kSlowInARow);
  until_probe_ = kProbePeriod;
}

namespace {

constexpr std::size_t kLineBytes = 64;  // a cache line: two cores should not write the same one
// published in steps, so that the peer reads while the rest is being copied
constexpr std::size_t kPublishBytes = 64 * 1024;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// One direction. Counters only grow; their difference is what waits in the ring.
struct Direction {
  alignas(kLineBytes) std::atomic<uint64_t> written;
  std::atomic<uint32_t> ended;  // no bytes follow
  alignas(kLineBytes) std::atomic<uint64_t> read;
};

constexpr uint32_t kWantsBytes = 1, kWantsRoom = 2;

// At the beginning of the shared memory, which is zero at first.
struct Control {
  Direction directions[2];
  struct alignas(kLineBytes) Sleeper {
    std::atomic<uint32_t> wants;  // not 0: that side sleeps, or is about to; the events for which its bell is rung
  } sleepers[2];
};
static_assert(sizeof(Control) <= PairMemory::kControlBytes);

// Single producer, single consumer per direction. A side that is about to sleep first sets `wants`, then checks the
// counters once more; the other side first moves its counter, then reads `wants`. Both in sequentially consistent
// order, so one of the two sees the other.
class ShmChannel final : public Channel, private DirectReader {
 public:
  explicit ShmChannel(SharedPair pair)
      : memory_(std::move(pair.memory)),
        socket_(std::move(pair.socket)),
        description_("shm " + pair.peer),
        control_(*std::launder(reinterpret_cast<Control*>(memory_.control()))),
        out_(control_.directions[pair.side]),
        in_(control_.directions[1 - pair.side]),
        own_sleep_(control_.sleepers[pair.side]),
        peer_sleep_(control_.sleepers[1 - pair.side]),
        out_ring_(memory_.ring(pair.side)),
        in_ring_(memory_.ring(1 - pair.side)),
        size_(memory_.ring_bytes()),
        bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    hand_over_bell();
  }

  IoResult send(std::span<const iovec> pieces) override {
    std::size_t moved = 0;
    for (const iovec& piece : pieces) {
      const auto* from = static_cast<const std::byte*>(piece.iov_base);
      for (std::size_t done = 0; done < piece.iov_len;) {
        std::size_t room = room_for(piece.iov_len - done);
        if (room == 0) {
          if (moved > 0) return sent(moved);
          return broken_ ? IoResult{IoStatus::kBroken, 0, EPROTO} : IoResult{IoStatus::kWouldBlock};
        }
        std::size_t part = std::min({piece.iov_len - done, room, kPublishBytes - (written_ - published_)});
        writer_.copy(out_ring_ + written_ % size_, from + done, part);
        written_ += part;
        moved += part;
        done += part;
        if (written_ - published_ == kPublishBytes) publish();
      }
    }
    return sent(moved);
  }

  DirectReader* direct() override { return this; }
  IoResult receive(std::span<const iovec>) override { return {IoStatus::kBroken, 0, ENOTSUP}; }

  IoStatus peek(std::span<const std::byte>& bytes) override {
    uint64_t written = in_.written.load(std::memory_order_acquire);
    if (written == read_) {
      bytes = {};
      return nothing_there();
    }
    if (written - read_ > size_) {
      broken_ = true;
      return IoStatus::kBroken;
    }
    bytes = {in_ring_ + read_ % size_, static_cast<std::size_t>(written - read_)};
    return IoStatus::kOk;
  }

  void consume(std::size_t bytes) override {
    read_ += bytes;
    in_.read.store(read_, std::memory_order_seq_cst);
    // A writer sleeps only when the ring is full. It is woken when half is free; earlier, it would sleep again at
    // once.
    if (in_.written.load(std::memory_order_relaxed) - read_ <= size_ / 2) ring_if(kWantsRoom);
  }

  // The peer has its own mapping, which lasts after this rank has left.
  bool drained() override { return true; }
  void close_send() override {
    out_.ended.store(1, std::memory_order_release);
    shutdown(socket_.get(), SHUT_WR);
  }
  int poll_fd() const override { return socket_.get(); }
  int bell_fd() const override { return bell_.get(); }

  bool before_sleep(bool for_room) override {
    own_sleep_.wants.store(for_room ? kWantsBytes | kWantsRoom : kWantsBytes, std::memory_order_seq_cst);
    bool bytes_there = in_.written.load(std::memory_order_seq_cst) != read_;
    bool room_there = for_room && out_.read.load(std::memory_order_seq_cst) != read_by_peer_;
    return !bytes_there && !room_there;
  }
  void after_sleep() override { own_sleep_.wants.store(0, std::memory_order_relaxed); }
  void noticed() override { look_at_socket_ = true; }

  std::string describe() const override { return description_; }

 private:
  std::size_t room_for(std::size_t wanted) {
    std::size_t room = size_ - static_cast<std::size_t>(written_ - read_by_peer_);
    if (room >= wanted) return room;
    uint64_t read = out_.read.load(std::memory_order_acquire);
    if (read < read_by_peer_ || read > written_) broken_ = true;
    if (broken_) return 0;
    read_by_peer_ = read;
    return size_ - static_cast<std::size_t>(written_ - read_by_peer_);
  }

  IoResult sent(std::size_t bytes) {
    publish();
    ring_if(kWantsBytes);  // once, not for every stretch: to wake the peer costs as much as to copy one
    return {IoStatus::kOk, bytes};
  }

  void publish() {
    if (published_ == written_) return;
    published_ = written_;
    out_.written.store(written_, std::memory_order_seq_cst);
  }

  void ring_if(uint32_t what) {
    if ((peer_sleep_.wants.load(std::memory_order_seq_cst) & what) == 0) return;
    if ((peer_sleep_.wants.exchange(0, std::memory_order_seq_cst) & what) == 0) return;
    if (!peer_bell_) take_bell();
    uint64_t once = 1;
    if (peer_bell_ && write(peer_bell_.get(), &once, sizeof(once)) == sizeof(once)) return;
    char ring = 1;
    // A full socket is readable already; a broken one is noticed at the next read.
    [[maybe_unused]] auto ignored = ::send(socket_.get(), &ring, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  // An eventfd rather than the socket: the kernel takes a write to that for a hand-over and wakes the sleeper on the
  // core of the writer, which goes on; two ranks then share one core while another is idle (45 us per small
  // all-reduce, 9 apart). If descriptors have run out, the socket is used.
  void hand_over_bell() {
    if (!bell_) return;
    std::byte byte{0};
    [[maybe_unused]] auto ignored = send_with_descriptor(socket_.get(), {&byte, 1}, bell_);
  }

  // Like `recv`, but also takes the peer's bell, which comes with the first byte on the socket, before the peer can
  // sleep.
  ssize_t take_bell() {
    std::array<std::byte, 64> bytes;
    return receive_with_descriptor(socket_.get(), bytes, peer_bell_);
  }

  // The ring is empty. The end of the stream is checked only here, after all bytes that the peer wrote before it.
  IoStatus nothing_there() {
    if (in_.ended.load(std::memory_order_acquire) != 0)
      return in_.written.load(std::memory_order_acquire) == read_ ? IoStatus::kClosed : IoStatus::kWouldBlock;
    if (!look_at_socket_) return IoStatus::kWouldBlock;
    look_at_socket_ = false;
    for (;;) {
      ssize_t count = take_bell();
      if (count > 0) return IoStatus::kWouldBlock;  // an end behind that byte is found at the next call
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return IoStatus::kWouldBlock;
      break;
    }
    look_at_socket_ = true;  // the next call returns the end again
    return in_.written.load(std::memory_order_acquire) == read_ ? IoStatus::kClosed : IoStatus::kWouldBlock;
  }

  PairMemory memory_;
  Fd socket_;
  std::string description_;
  Control& control_;
  Direction& out_;
  Direction& in_;
  Control::Sleeper& own_sleep_;
  Control::Sleeper& peer_sleep_;
  std::byte* out_ring_;
  const std::byte* in_ring_;
  std::size_t size_;
  SlotWriter writer_;
  Fd bell_;       // what wakes this side
  Fd peer_bell_;  // what wakes the other; empty before it came

  uint64_t written_ = 0;
  uint64_t published_ = 0;
  uint64_t read_by_peer_ = 0;  // as last seen
  uint64_t read_ = 0;
  bool look_at_socket_ = false;
  bool broken_ = false;  // the counters are invalid
};

}  // namespace

std::unique_ptr<Channel> make_shm_channel(SharedPair pair) { return std::make_unique<ShmChannel>(std::move(pair)); }

const Transport& shm_transport() {
  static constexpr Transport kShm{.name = "shm", .title = "shared memory", .same_host = true, .direct = true};
  return kShm;
}

}  // namespace ringdp
