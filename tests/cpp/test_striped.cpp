// A channel over several sockets (transport/striped.h): who carries what, order, bounded memory, and every way to end.
// What it has in common with other channels is in test_channel.cpp.
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "base/deadline.h"
#include "testing.h"
#include "transport/poller.h"
#include "transport/stripe_lane.h"
#include "transport/striped.h"

namespace ringdp::testing {
namespace {

// One way of a socket, in memory: what is written waits until it is `let` through. It has a descriptor only for the
// Poller.
struct Wire {
  std::vector<std::byte> bytes;
  std::size_t read = 0;        // taken by the receiver
  std::size_t passed = 0;      // of `bytes`: may be taken
  std::size_t room = 8 << 20;  // for bytes that are not taken yet
  bool ended = false;
  int error_number = 0;
};

class WireChannel final : public Channel, private NetworkPath {
 public:
  WireChannel(std::shared_ptr<Wire> out, std::shared_ptr<Wire> in) : out_(std::move(out)), in_(std::move(in)) {
    std::array<int, 2> pair{};
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()) == 0);
    fd_ = Fd(pair[0]);
    far_ = Fd(pair[1]);
    const char bell = 0;  // always readable: the test decides what there is
    REQUIRE(::send(far_.get(), &bell, 1, 0) == 1);
  }

  IoResult send(std::span<const iovec> pieces) override {
    if (out_->error_number != 0) return {IoStatus::kBroken, 0, out_->error_number};
    std::size_t moved = 0;
    for (const iovec& it : pieces) {
      const std::size_t room = out_->room - std::min(out_->room, out_->bytes.size() - out_->read);
      const std::size_t part = std::min(room, it.iov_len);
      const auto* from = static_cast<const std::byte*>(it.iov_base);
      out_->bytes.insert(out_->bytes.end(), from, from + part);
      moved += part;
      if (part < it.iov_len) break;
    }
    return moved > 0 ? IoResult{IoStatus::kOk, moved, 0} : IoResult{IoStatus::kWouldBlock, 0, 0};
  }

  IoResult receive(std::span<const iovec> pieces) override {
    std::size_t moved = 0;
    for (const iovec& it : pieces) {
      const std::size_t part = std::min(it.iov_len, in_->passed - in_->read);
      if (part > 0) std::memcpy(it.iov_base, in_->bytes.data() + in_->read, part);
      in_->read += part;
      moved += part;
    }
    if (moved > 0) return {IoStatus::kOk, moved, 0};
    if (in_->error_number != 0) return {IoStatus::kBroken, 0, in_->error_number};
    return {in_->ended && in_->read == in_->bytes.size() ? IoStatus::kClosed : IoStatus::kWouldBlock, 0, 0};
  }

  bool drained() override { return true; }
  void close_send() override { out_->ended = true; }
  int poll_fd() const override { return fd_.get(); }
  std::string describe() const override { return "wire"; }
  NetworkPath* path() override { return this; }

  // A byte that the far end has taken: the descriptor says anew that there is room.
  void ring() {
    char bell = 0;
    REQUIRE(::send(fd_.get(), &bell, 1, 0) == 1 && ::recv(far_.get(), &bell, 1, 0) == 1);
  }

 private:
  std::shared_ptr<Wire> out_, in_;
  Fd fd_, far_;
};

struct Pair {
  std::vector<std::shared_ptr<Wire>> there, back;
  std::vector<WireChannel*> sockets_of_a;  // owned by it
  std::unique_ptr<Channel> a, b;
};

Pair make_pair(int streams, std::size_t reorder_bytes = kReorderBytes) {
  Pair out;
  std::vector<std::unique_ptr<Channel>> a, b;
  for (int i = 0; i < streams; ++i) {
    out.there.push_back(std::make_shared<Wire>());
    out.back.push_back(std::make_shared<Wire>());
    auto made = std::make_unique<WireChannel>(out.there[i], out.back[i]);
    out.sockets_of_a.push_back(made.get());
    a.push_back(std::move(made));
    b.push_back(std::make_unique<WireChannel>(out.back[i], out.there[i]));
  }
  out.a = make_striped_channel(std::move(a), reorder_bytes);
  out.b = make_striped_channel(std::move(b), reorder_bytes);
  return out;
}

std::vector<std::byte> pattern(std::size_t bytes) {
  std::mt19937_64 random(7);
  std::vector<std::byte> out(bytes);
  for (auto& it : out) it = static_cast<std::byte>(random());
  return out;
}

std::size_t offer(Channel& to, std::span<const std::byte> bytes) {
  const iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  const IoResult result = to.send(std::span(&piece, 1));
  REQUIRE(result.status == IoStatus::kOk || result.status == IoStatus::kWouldBlock);
  return result.bytes;
}

IoResult take(Channel& from, std::vector<std::byte>& into, std::size_t most) {
  const std::size_t at = into.size();
  into.resize(at + most);
  const iovec piece{into.data() + at, most};
  const IoResult result = from.receive(std::span(&piece, 1));
  into.resize(at + result.bytes);
  return result;
}

void pass(Wire& wire) { wire.passed = wire.bytes.size(); }

CASE(
    "a line that loses much gets fewer sockets, one that loses little keeps them, and after a while it may have more "
    "again") {
  CrowdedLine line;
  Clock::time_point now{std::chrono::hours(1)};
  uint64_t packets = 0, lost = 0;
  const auto next = [&](uint64_t sent, uint64_t again, Clock::duration time = CrowdedLine::kLookEvery) {
    now += time;
    CHECK(line.wants_look(now));
    line.look(packets += sent, lost += again, 32, now);
    return line.in_use(32);
  };
  CHECK_EQ(next(1000, 100), 32u);
  CHECK_EQ(next(50, 49), 32u);  // too few to say
  CHECK_EQ(next(1000, 500), 16u);
  for (int i = 0; i < 10; ++i) next(1000, 500);
  CHECK_EQ(line.in_use(32), 1u);
  CHECK_EQ(next(1000, 10), 1u);
  CHECK_EQ(next(1000, 10, CrowdedLine::kMoreAgainAfter * 2), 2u);
  CHECK_EQ(next(1000, 10), 2u);
  CHECK_EQ(next(1000, 500), 1u);
}

// Nothing arrives on it for a while, or so much, as its system says.
class HeldUpChannel final : public Channel, private NetworkPath {
 public:
  HeldUpChannel(int64_t held_up_ms, std::shared_ptr<uint64_t> arrived)
      : held_up_ms_(held_up_ms), arrived_(std::move(arrived)), fd_(eventfd(0, EFD_CLOEXEC)) {}

  IoResult send(std::span<const iovec>) override { return {IoStatus::kWouldBlock, 0, 0}; }
  IoResult receive(std::span<const iovec>) override { return {IoStatus::kWouldBlock, 0, 0}; }
  bool drained() override { return true; }
  void close_send() override {}
  int poll_fd() const override { return fd_.get(); }
  NetworkPath* path() override { return this; }
  std::string describe() const override { return "held up"; }

 private:
  HeldUp held_up() override { return {held_up_ms_, 1448}; }
  std::optional<Carried> carried() const override { return Carried{.bytes = *arrived_}; }

  const int64_t held_up_ms_;
  std::shared_ptr<uint64_t> arrived_;
  Fd fd_;
};

CASE("a socket of which nothing arrives is unlucky as long as much arrives on the others, but not for ever") {
  for (int64_t ms : {5'000, 16'000}) {
    const auto arrived = std::make_shared<uint64_t>(0);
    std::vector<std::unique_ptr<Channel>> sockets;
    sockets.push_back(std::make_unique<HeldUpChannel>(ms, std::make_shared<uint64_t>(0)));
    sockets.push_back(std::make_unique<HeldUpChannel>(0, arrived));
    const auto channel = make_striped_channel(std::move(sockets));
    *arrived = 100'000;
    const int64_t said_ms = channel->path()->held_up().ms;
    if (ms < 15'000) CHECK(said_ms < 4'000);
    if (ms > 15'000) CHECK_EQ(said_ms, ms);
  }
}

}  // namespace

CASE("every socket carries its share where all have room, and one that has none carries nothing more") {
  Pair pair = make_pair(4);
  pair.there[2]->room = 20'000;
  const auto sent = pattern(2'000'000);
  REQUIRE(offer(*pair.a, sent) == sent.size());
  CHECK(pair.there[2]->bytes.size() <= 20'000);
  for (int i : {0, 1, 3}) CHECK(pair.there[i]->bytes.size() > 600'000 && pair.there[i]->bytes.size() < 720'000);
}

CASE("bytes arrive in order however the sockets overtake each other, whole or cut anywhere") {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    std::mt19937_64 random(seed);
    Pair pair = make_pair(1 + static_cast<int>(random() % 5));
    const auto sent = pattern(300'000);
    std::vector<std::byte> received;
    std::size_t offered = 0;
    for (auto& it : pair.there) it->room = 1000 + random() % 60'000;
    for (int turn = 0; received.size() < sent.size(); ++turn) {
      REQUIRE(turn < 1'000'000);
      const std::size_t part = std::min<std::size_t>(1 + random() % 50'000, sent.size() - offered);
      offered += offer(*pair.a, std::span(sent).subspan(offered, part));
      Wire& wire = *pair.there[random() % pair.there.size()];
      wire.passed += std::min<std::size_t>(wire.bytes.size() - wire.passed, 1 + random() % 30'000);
      const IoResult result = take(*pair.b, received, 1 + random() % 20'000);
      REQUIRE(result.status == IoStatus::kOk || result.status == IoStatus::kWouldBlock);
      for (WireChannel* it : pair.sockets_of_a) it->ring();
      std::vector<std::byte> none;
      REQUIRE(take(*pair.a, none, 1).status == IoStatus::kWouldBlock);  // finds the room
    }
    CHECK(received == sent);
  }
}

CASE("a stripe that is missing holds its successors back in bounded memory, and the rest waits in the sockets") {
  constexpr std::size_t kReach = 100'000;
  Pair pair = make_pair(2, kReach);
  const auto sent = pattern(1'000'000);
  REQUIRE(offer(*pair.a, sent) == sent.size());
  pass(*pair.there[1]);  // the first stripe is on the other one
  std::vector<std::byte> received;
  for (int i = 0; i < 5; ++i) CHECK(take(*pair.b, received, 50'000).status == IoStatus::kWouldBlock);
  CHECK(pair.there[1]->read < kReach);  // every other stripe
  CHECK(pair.there[1]->read > kReach / 4);
  pass(*pair.there[0]);
  while (received.size() < sent.size()) REQUIRE(take(*pair.b, received, 50'000).status == IoStatus::kOk);
  CHECK(received == sent);
}

CASE("a socket that must wait for others lets the driver rest; what is here and was not taken does not") {
  Pair pair = make_pair(2, 40'000);
  Poller poller;
  poller.add(pair.b->poll_fd(), 0);
  const auto rests = [&] {
    (void)pair.b->drained();  // looks for room
    return poller.wait(0).empty();
  };
  const auto sent = pattern(400'000);
  REQUIRE(offer(*pair.a, sent) == sent.size());
  pass(*pair.there[1]);
  std::vector<std::byte> received;
  CHECK(take(*pair.b, received, 1000).status == IoStatus::kWouldBlock);
  CHECK(received.empty() && !rests());  // the other socket may bring what is missing
  pair.there[0]->error_number = ECONNRESET;
  CHECK(take(*pair.b, received, 1000).status == IoStatus::kWouldBlock);
  CHECK(rests());

  pair = make_pair(2);
  Poller other;
  other.add(pair.b->poll_fd(), 0);
  REQUIRE(offer(*pair.a, sent) == sent.size());
  pass(*pair.there[1]);
  CHECK(take(*pair.b, received, 1000).status == IoStatus::kWouldBlock);
  pass(*pair.there[0]);
  for (auto& it : pair.there) it->ended = true;
  while (received.size() < 200'000) {
    CHECK(!other.wait(0).empty());
    REQUIRE(take(*pair.b, received, 1000).status == IoStatus::kOk);
  }
}

CASE("the end: after the last byte, whichever socket brings it; a socket that ends before is the end of all") {
  for (int last : {0, 1, 2}) {
    Pair pair = make_pair(3);
    const auto sent = pattern(100'000);
    REQUIRE(offer(*pair.a, sent) == sent.size());
    pair.a->close_send();
    std::vector<std::byte> received;
    for (int i = 0; i < 3; ++i)
      if (i != last) pass(*pair.there[i]);
    for (int i = 0; i < 20; ++i) REQUIRE(take(*pair.b, received, 30'000).status != IoStatus::kClosed);
    pass(*pair.there[last]);
    IoResult result{};
    while ((result = take(*pair.b, received, 30'000)).status == IoStatus::kOk) {
    }
    CHECK(result.status == IoStatus::kClosed);
    CHECK(received == sent);
  }
  for (int error_number : {0, ECONNRESET}) {
    Pair pair = make_pair(3);
    const auto sent = pattern(100'000);
    REQUIRE(offer(*pair.a, sent) == sent.size());
    for (auto& it : pair.there) pass(*it);
    pair.there[1]->ended = true;
    pair.there[1]->error_number = error_number;
    std::vector<std::byte> received;
    while (take(*pair.b, received, 30'000).status == IoStatus::kOk) {
    }
    CHECK(received == sent);
    for (auto& it : pair.back) CHECK(it->ended);   // the peer is told on every socket
    for (auto& it : pair.there) it->ended = true;  // and ends them, too
    const IoResult result = take(*pair.b, received, 1000);
    CHECK(result.status == (error_number == 0 ? IoStatus::kClosed : IoStatus::kBroken));
    CHECK(result.error_number == error_number);
  }
}

CASE("cut at every byte of a socket: what came before is received, nothing is invented, and it ends") {
  const auto sent = pattern(40'000);
  for (std::size_t cut = 0; cut < 16'500; cut += cut < 40 || cut > 16'300 ? 1 : 997) {
    Pair pair = make_pair(2);
    REQUIRE(offer(*pair.a, sent) == sent.size());
    Wire& wire = *pair.there[0];
    wire.bytes.resize(std::min(cut, wire.bytes.size()));
    for (auto& it : pair.there) {
      pass(*it);
      it->ended = true;
    }
    std::vector<std::byte> received;
    IoResult result{};
    for (int i = 0; i < 10; ++i) result = take(*pair.b, received, 30'000);
    CHECK(result.status == IoStatus::kClosed || result.status == IoStatus::kBroken);
    CHECK(received.size() <= sent.size());
    CHECK(std::equal(received.begin(), received.end(), sent.begin()));
  }
}

CASE("bytes that are not stripes break the channel") {
  std::mt19937_64 random(3);
  const auto sent = pattern(50'000);
  for (int kind = 0; kind < 5; ++kind) {
    Pair pair = make_pair(2);
    REQUIRE(offer(*pair.a, sent) == sent.size());
    Wire& wire = *pair.there[0];
    Stripe stripe{0, 16'384};
    if (kind == 0) wire.bytes[random() % Stripe::kHeadBytes] ^= std::byte{1};
    if (kind == 1) stripe.length = Stripe::kMostBytes + 1;
    if (kind == 2) stripe.offset = uint64_t{1} << 63;
    if (kind == 3) stripe.offset = 16'384;  // the other socket has these
    if (kind == 4) stripe.length = 0;       // ends, and goes on
    if (kind > 0) stripe.encode(wire.bytes.data());
    for (auto& it : pair.there) pass(*it);
    std::vector<std::byte> received;
    IoResult result{};
    for (int i = 0; i < 100 && result.status == IoStatus::kOk; ++i) result = take(*pair.b, received, 30'000);
    CHECK(result.status == IoStatus::kBroken);
    CHECK(result.error_number == EBADMSG);
  }
}

CASE("nothing is sent for nothing") {
  Pair pair = make_pair(3);
  CHECK(pair.a->send({}).bytes == 0);
  const iovec empty{nullptr, 0};
  CHECK(pair.a->send(std::span(&empty, 1)).bytes == 0);
  for (auto& it : pair.there) CHECK(it->bytes.empty());
  std::vector<std::byte> received;
  CHECK(take(*pair.b, received, 10).status == IoStatus::kWouldBlock);
}

}  // namespace ringdp::testing
