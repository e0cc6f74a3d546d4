#include "transport/striped.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "transport/stripe_lane.h"
#include "transport/tcp.h"
#include "transport/tcp_health.h"

namespace ringdp {
namespace {

constexpr std::size_t kStripeBytes = 16 * 1024;
constexpr std::size_t kLeastStripeBytes = 4 * 1024;
constexpr std::size_t kShortStripeBytes =
    2 * 1400;                                    // what a socket sends at once after a pause; later packets are paced
constexpr std::size_t kUnsentBytes = 32 * 1024;  // of one socket: more bytes would wait for its retransmissions
constexpr int64_t kRestsMs = 200;                // after so long without bytes its round trip is outdated
constexpr uint64_t kArrivesBytes = 16 * 1024;    // on any socket: so large packets arrive
constexpr int64_t kUnluckyMs = 15'000;           // without an answer on one socket: about six retransmissions
// In the events of sockets:
constexpr uint32_t kRoom = kMostStreams;  // one of them has room
constexpr uint32_t kMore = kRoom + 1;     // unread bytes are buffered here
constexpr std::size_t kMostEvents = kMore + 1;

Fd make_epoll() {
  Fd made(epoll_create1(EPOLL_CLOEXEC));
  if (!made) throw_system("create an epoll descriptor", errno);
  return made;
}

void watch(const Fd& epoll, int fd, uint32_t token, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u32 = token;
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_system("watch a descriptor", errno);
}

struct Lane {
  explicit Lane(std::unique_ptr<Channel> channel)
      : socket(std::move(channel)), path(*socket->path()), out(*socket), in(*socket) {}

  std::unique_ptr<Channel> socket;
  NetworkPath& path;
  StripeSender out;
  StripeReceiver in;
  bool watched = true;  // for bytes
};

class StripedChannel final : public Channel, private NetworkPath {
 public:
  StripedChannel(std::vector<std::unique_ptr<Channel>> sockets, std::size_t reorder_bytes)
      : readable_(make_epoll()),
        room_(make_epoll()),
        more_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        buffer_(reorder_bytes) {
    if (!more_) throw_system("create an eventfd", errno);
    for (auto& it : sockets) add(std::move(it));
    watch(readable_, room_.get(), kRoom, EPOLLIN);
    watch(readable_, more_.get(), kMore, EPOLLIN);
    look_for_room();  // each has room: clears the events
  }

  IoResult send(std::span<const iovec> pieces) override;
  IoResult receive(std::span<const iovec> pieces) override;
  NetworkPath* path() override { return this; }

  // Later stripes are also sent on it.
  void add_stream(Fd socket) override {
    if (lanes_.size() == kMostStreams || closing_ || abandoned_ || send_error_ != 0)
      return;  // the other side sees its end
    add(make_tcp_channel(std::move(socket)));
    lanes_.back()->out.doubt();
    if (silence_ms_ > 0) lanes_.back()->path.watch_host(silence_ms_);
    if (unsent_bytes_ > 0) limit_unsent(unsent_bytes_);
    look_for_room();
  }

  void limit_unsent(std::size_t bytes) override {
    unsent_bytes_ = bytes;
    stripe_bytes_ = std::clamp(bytes / lanes_.size(), kLeastStripeBytes, kStripeBytes);
    for (auto& it : lanes_) it->path.limit_unsent(stripe_bytes_);
  }

  // A delivered stripe counts only if all before it are delivered.
  std::size_t undelivered() override {
    uint64_t from = sent_;
    for (auto& it : lanes_) from = std::min(from, it->out.undelivered_from().value_or(sent_));
    return static_cast<std::size_t>(sent_ - from);
  }

  bool drained() override {
    look_for_room();
    return std::all_of(lanes_.begin(), lanes_.end(),
                       [](auto& it) { return it->out.flushed() && it->socket->drained(); });
  }

  void close_send() override {
    closing_ = true;
    for (auto& it : lanes_) note_sent(it->out.finish(sent_));
  }

  int poll_fd() const override { return readable_.get(); }

  void watch_host(int64_t silence_ms) override {
    silence_ms_ = silence_ms;
    for (auto& it : lanes_) it->path.watch_host(silence_ms);
  }

  // The host answers if it answers on one of them.
  int64_t host_silence_ms() override {
    int64_t shortest = 0;
    for (auto& it : lanes_)
      if (const int64_t ms = it->path.host_silence_ms(); ms > 0) shortest = shortest == 0 ? ms : std::min(shortest, ms);
    return shortest;
  }

  HeldUp held_up() override;
  std::optional<Carried> carried() const override;

  std::string slowed_by() const override {
    std::string text;
    for (auto it = lanes_.begin(); it != lanes_.end() && text.empty(); ++it) text = (*it)->path.slowed_by();
    return text;
  }

  std::string describe() const override {
    const std::string first = lanes_.front()->socket->describe();
    return lanes_.size() == 1 ? first : first + " and " + std::to_string(lanes_.size() - 1) + " more streams";
  }

 private:
  void add(std::unique_ptr<Channel> socket) {
    const auto token = static_cast<uint32_t>(lanes_.size());
    watch(readable_, socket->poll_fd(), token, EPOLLIN);
    watch(room_, socket->poll_fd(), token, EPOLLOUT | EPOLLET);
    lanes_.push_back(std::make_unique<Lane>(std::move(socket)));
    lanes_.back()->path.limit_unsent(kUnsentBytes);
  }
  void look_for_room();
  void note_sent(const IoResult& result);
  void look_for_losses();
  void follow(uint32_t lane);
  bool wake_stalled();
  void note_more();
  IoStatus end_of_stream(int& error_number);
  void abandon();

  Fd readable_;  // a socket has bytes, or one of the next two is readable
  Fd room_;      // a socket has room again; edge-triggered
  Fd more_;      // eventfd(2)
  std::vector<std::unique_ptr<Lane>> lanes_;
  ReorderBuffer buffer_;
  std::size_t stripe_bytes_ = kStripeBytes;
  std::size_t turn_ = 0;  // the lane that is asked first
  CrowdedLine line_;
  uint64_t arrived_ = 0;  // bytes, at the last growth
  Clock::time_point arrived_at_ = Clock::now();
  uint64_t sent_ = 0;
  int send_error_ = 0;
  std::size_t unsent_bytes_ = 0;  // as limited; 0: not
  int64_t silence_ms_ = 0;        // as watched; 0: not
  bool closing_ = false;
  bool abandoned_ = false;
  bool says_more_ = false;
};

void StripedChannel::note_sent(const IoResult& result) {
  if (result.status == IoStatus::kBroken && send_error_ == 0) send_error_ = result.error_number;
}

void StripedChannel::look_for_room() {
  std::array<epoll_event, kMostStreams> events;
  const int count = epoll_wait(room_.get(), events.data(), static_cast<int>(lanes_.size()), 0);
  for (int i = 0; i < count; ++i) note_sent(lanes_[events[i].data.u32]->out.flush());
}

void StripedChannel::look_for_losses() {
  const auto now = Clock::now();
  if (!line_.wants_look(now)) return;
  uint64_t packets = 0, lost = 0;
  for (auto& it : lanes_) {
    const TcpLimits seen = TcpLimits::of(it->socket->poll_fd());
    packets += seen.sent;
    lost += seen.sent_again;
  }
  line_.look(packets, lost, lanes_.size(), now);
}

IoResult StripedChannel::send(std::span<const iovec> pieces) {
  look_for_losses();
  const std::size_t in_use = line_.in_use(lanes_.size());
  PieceCursor from(pieces);
  bool looked = false;
  // A short message is divided over all sockets, so it arrives sooner.
  const std::size_t share = (from.left() + in_use - 1) / in_use;
  const std::size_t stripe = std::clamp(share, std::min(kShortStripeBytes, stripe_bytes_), stripe_bytes_);
  while (from.left() > 0 && send_error_ == 0) {
    std::size_t tried = 0;
    for (turn_ %= in_use; tried < in_use && !lanes_[turn_]->out.has_room(); ++tried) turn_ = (turn_ + 1) % in_use;
    if (tried == in_use) {
      if (std::exchange(looked, true)) break;
      look_for_room();
      continue;
    }
    const IoResult result = lanes_[turn_]->out.put(sent_, std::min(stripe, from.left()), from);
    note_sent(result);
    if (result.status != IoStatus::kOk) continue;
    sent_ += result.bytes;
    from.skip(result.bytes);
    turn_ = (turn_ + 1) % in_use;
  }
  if (from.done() > 0) return {IoStatus::kOk, from.done(), 0};
  if (send_error_ != 0) return {IoStatus::kBroken, 0, send_error_};
  return {IoStatus::kWouldBlock, 0, 0};
}

IoResult StripedChannel::receive(std::span<const iovec> pieces) {
  PieceCursor to(pieces);
  buffer_.deliver(to);
  std::array<epoll_event, kMostEvents> events;
  do {
    const int count = epoll_wait(readable_.get(), events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < count; ++i) {
      const uint32_t lane = events[i].data.u32;
      if (lane == kRoom) look_for_room();
      if (lane >= lanes_.size()) continue;
      lanes_[lane]->in.pull(buffer_, to);
      if (lanes_[lane]->in.has_begun()) lanes_[lane]->out.trust();
      follow(lane);
    }
  } while (wake_stalled() && to.left() > 0);
  note_more();
  if (to.done() > 0) return {IoStatus::kOk, to.done(), 0};
  int error_number = 0;
  const IoStatus status = end_of_stream(error_number);
  return {status, 0, error_number};
}

// A socket beyond the buffer's limit, or at its end, would wake the driver again and again.
void StripedChannel::follow(uint32_t lane) {
  Lane& it = *lanes_[lane];
  const bool wanted = !it.in.ended() && !it.in.stalled(buffer_);
  if (wanted == it.watched) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = lane;
  epoll_ctl(readable_.get(), wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, it.socket->poll_fd(), &event);
  it.watched = wanted;
}

// True if a socket that had to wait may go on.
bool StripedChannel::wake_stalled() {
  bool woken = false;
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    if (lanes_[lane]->watched) continue;
    follow(lane);
    woken |= lanes_[lane]->watched;
  }
  return woken;
}

// Bytes that are buffered here in order do not make a socket readable.
void StripedChannel::note_more() {
  if (buffer_.ready() == says_more_) return;
  says_more_ = !says_more_;
  uint64_t value = 1;
  [[maybe_unused]] const ssize_t moved =
      says_more_ ? ::write(more_.get(), &value, sizeof(value)) : ::read(more_.get(), &value, sizeof(value));
}

// Nothing has come. A socket that ends before the stream ends the channel, after bytes of the others were read.
IoStatus StripedChannel::end_of_stream(int& error_number) {
  std::size_t ended = 0;
  for (auto& it : lanes_) {
    if (!it->in.ended()) continue;
    ++ended;
    if (error_number == 0) error_number = it->in.error_number();
    if (!it->in.stream_end()) abandon();
  }
  if (error_number == EBADMSG) return IoStatus::kBroken;
  if (ended < lanes_.size()) {
    error_number = 0;
    return IoStatus::kWouldBlock;
  }
  const bool whole = std::all_of(lanes_.begin(), lanes_.end(), [this](auto& it) {
    return !it->in.stream_end() || *it->in.stream_end() == buffer_.next();
  });
  if (!whole && error_number == 0) error_number = ECONNRESET;
  return error_number == 0 ? IoStatus::kClosed : IoStatus::kBroken;
}

// Closes all sockets, so that the peer ends the channel too.
void StripedChannel::abandon() {
  if (std::exchange(abandoned_, true)) return;
  for (auto& it : lanes_) it->socket->close_send();
}

NetworkPath::HeldUp StripedChannel::held_up() {
  HeldUp longest;
  int64_t shortest_silence = INT64_MAX, longest_silence = 0;
  for (auto& it : lanes_) {
    const HeldUp held_up = it->path.held_up();
    const int64_t silence = it->path.host_silence_ms();
    shortest_silence = std::min(shortest_silence, silence);
    longest_silence = std::max(longest_silence, silence);
    if (held_up.ms > longest.ms) longest = held_up;
  }
  // If the other connections deliver, the MTU is not the problem.
  const auto now = Clock::now();
  if (const auto all = carried(); all && all->bytes - arrived_ >= kArrivesBytes) {
    arrived_ = all->bytes;
    arrived_at_ = now;
  }
  const auto since_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - arrived_at_).count();
  if (longest.ms < kUnluckyMs) longest.ms = std::min<int64_t>(longest.ms, since_ms);
  // One socket delivers nothing, others do. With many sockets such bad luck is more frequent, so the limit is longer.
  if (longest.ms == 0 && longest_silence >= kUnluckyMs && shortest_silence < kUnluckyMs) longest.ms = longest_silence;
  return longest;
}

std::optional<NetworkPath::Carried> StripedChannel::carried() const {
  Carried all;
  const auto shorter = [](int64_t a, int64_t b) { return a == 0 || b == 0 ? std::max(a, b) : std::min(a, b); };
  int64_t resting_us = 0;
  all.idle_ms = INT64_MAX;
  for (const auto& it : lanes_) {
    const auto one = it->path.carried();
    if (!one) return std::nullopt;
    all.bytes += one->bytes;
    all.busy_us = std::max(all.busy_us, one->busy_us);
    int64_t& round_trip_us = one->idle_ms < kRestsMs ? all.round_trip_us : resting_us;
    round_trip_us = shorter(round_trip_us, one->round_trip_us);
    all.least_round_trip_us = shorter(all.least_round_trip_us, one->least_round_trip_us);
    all.idle_ms = std::min(all.idle_ms, one->idle_ms);
    all.bytes_per_s += one->bytes_per_s;
  }
  if (all.round_trip_us == 0) all.round_trip_us = resting_us;
  return all;
}

}  // namespace

std::unique_ptr<Channel> make_striped_channel(std::vector<std::unique_ptr<Channel>> sockets,
                                              std::size_t reorder_bytes) {
  return std::make_unique<StripedChannel>(std::move(sockets), reorder_bytes);
}

}  // namespace ringdp
