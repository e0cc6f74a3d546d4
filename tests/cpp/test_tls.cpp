// TLS over a wire that the test is in the middle of: it reads what goes by, and flips, cuts, repeats, leaves out or
// exchanges some of it. Whatever it does, no wrong byte is delivered, and no end waits with its descriptor readable.
// That a TlsChannel is a channel: test_channel.cpp.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "job.h"
#include "sockets.h"
#include "testing.h"
#include "transport/tcp.h"
#include "transport/tls.h"

namespace ringdp::testing {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::size_t kTold = 128 * 1024;  // a receiver tells after so many bytes at the latest
constexpr int kMostRounds = 2000;

std::shared_ptr<const TlsContext> context() {
  static const auto made = make_tls_context({.mode = TlsMode::kSecret});
  return made;
}

Bytes pattern(std::size_t count) {
  static constexpr std::string_view kWords = "what nobody else may read; ";
  Bytes out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::byte>(kWords[i % kWords.size()]);
  return out;
}

std::array<Fd, 2> socket_pair() {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  return {Fd(ends[0]), Fd(ends[1])};
}

bool readable(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return poll(&polled, 1, 0) > 0;
}

// `change`: of the bytes that go by in direction `from`, of which `before` have gone by.
using Change = std::function<void(int from, std::size_t before, Bytes& bytes)>;

// End 1 has dialled. Each end sends `count` bytes, and expects as many.
class Wire {
 public:
  explicit Wire(std::size_t count = 0, Digest other_key = {}) : out_(pattern(count)) {
    for (int end : {0, 1}) {
      auto [outside, inside] = socket_pair();
      wire_[end] = std::move(inside);
      ends_[end] = make_tls_channel(make_tcp_channel(std::move(outside)),
                                    {.tls = context(), .key = end == 0 ? Digest{} : other_key, .dialled = end == 1});
    }
  }

  Channel& end(int which) { return *ends_[which]; }
  const Bytes& received(int end) const { return in_[end]; }
  std::size_t gone_by(int from) const { return gone_by_[from].size(); }
  const Bytes& seen(int from) const { return gone_by_[from]; }
  IoStatus status(int end) const { return status_[end]; }
  void cut() { wire_ = {}; }

  // Until nothing moves.
  void run(const Change& change = {}) {
    int rounds = 0;
    for (bool moved = true; moved;) {
      REQUIRE(++rounds < kMostRounds);
      moved = false;
      for (int end : {0, 1}) moved |= send(end) | receive(end);
      for (int from : {0, 1}) moved |= pass(from, change);
    }
    for (int end : {0, 1}) {
      CHECK(std::equal(in_[end].begin(), in_[end].end(), out_.begin()));
      CHECK(status_[end] != IoStatus::kWouldBlock || !readable(ends_[end]->poll_fd()));
    }
  }

  bool all_arrived() const { return in_[0].size() == out_.size() && in_[1].size() == out_.size(); }
  bool some_end_broke() const { return status_[0] == IoStatus::kBroken || status_[1] == IoStatus::kBroken; }

 private:
  bool send(int end) {
    std::array<iovec, 2> pieces{};
    const std::size_t left = out_.size() - sent_[end], head = std::min<std::size_t>(left, 64);
    pieces[0] = {out_.data() + sent_[end], head};
    pieces[1] = {out_.data() + sent_[end] + head, left - head};
    if (left == 0) return false;
    const IoResult result = ends_[end]->send(pieces);
    if (result.status == IoStatus::kOk) sent_[end] += result.bytes;
    return result.status == IoStatus::kOk;
  }

  bool receive(int end) {
    Bytes room(10'000);
    const iovec piece{room.data(), room.size()};
    const IoResult result = ends_[end]->receive(std::span(&piece, 1));
    status_[end] = result.status;
    REQUIRE(in_[end].size() + result.bytes <= out_.size());
    in_[end].insert(in_[end].end(), room.begin(), room.begin() + static_cast<std::ptrdiff_t>(result.bytes));
    return result.status == IoStatus::kOk;
  }

  bool pass(int from, const Change& change) {
    if (!wire_[from] || !wire_[1 - from]) return false;
    Bytes& held = held_[from];  // for which the other end had no room
    if (held.empty()) {
      held.resize(100'000);
      const ssize_t got = recv(wire_[from].get(), held.data(), held.size(), MSG_DONTWAIT);
      held.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
      if (got <= 0) return false;
      const std::size_t before = gone_by_[from].size();
      gone_by_[from].insert(gone_by_[from].end(), held.begin(), held.end());
      if (change) change(from, before, held);
    }
    const ssize_t sent = ::send(wire_[1 - from].get(), held.data(), held.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EAGAIN) return false;
    held.erase(held.begin(), sent < 0 ? held.end() : held.begin() + sent);
    return true;
  }

  Bytes out_;
  std::array<Fd, 2> wire_;
  std::array<std::unique_ptr<Channel>, 2> ends_;
  std::array<Bytes, 2> in_, gone_by_, held_;
  std::array<std::size_t, 2> sent_{};
  std::array<IoStatus, 2> status_{IoStatus::kWouldBlock, IoStatus::kWouldBlock};
};

// The records of TLS in these bytes: each begins with its type, and has its length in the bytes 3 and 4.
std::vector<Bytes> records(const Bytes& bytes) {
  std::vector<Bytes> out;
  for (std::size_t at = 0; at + 5 <= bytes.size();) {
    const std::size_t length =
        5 + (std::to_integer<std::size_t>(bytes[at + 3]) << 8) + std::to_integer<std::size_t>(bytes[at + 4]);
    const std::size_t end = std::min(at + length, bytes.size());
    out.emplace_back(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.begin() + static_cast<std::ptrdiff_t>(end));
    at = end;
  }
  return out;
}

bool holds(const Bytes& bytes, std::string_view words) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return text.find(words) != std::string_view::npos;
}

}  // namespace

CASE("what goes through cannot be read on the wire, and small pieces share a record") {
  Wire wire(50'000);
  wire.run();
  CHECK(wire.all_arrived());
  for (int from : {0, 1}) {
    CHECK(!holds(wire.seen(from), "nobody else"));
    CHECK(wire.gone_by(from) < 50'000 + 1000);
  }
  CHECK_EQ(wire.end(0).describe().substr(wire.end(0).describe().size() - 9), std::string(", TLS 1.3"));
}

CASE("a byte that is flipped anywhere is never delivered, and the end that finds it says so") {
  Wire whole(20'000);
  whole.run();
  int found = 0;
  for (int direction : {0, 1})
    for (std::size_t at = 0; at < whole.gone_by(direction); at += at < 1500 ? 7 : 613) {
      Wire wire(20'000);
      wire.run([&](int from, std::size_t before, Bytes& bytes) {
        if (from == direction && before <= at && at < before + bytes.size()) bytes[at - before] ^= std::byte{0x20};
      });
      if (wire.all_arrived()) continue;      // of what TLS does not use: the version of the first record
      if (!wire.some_end_broke()) continue;  // a length: the rest does not come
      ++found;
      const int end = wire.status(1 - direction) == IoStatus::kBroken ? 1 - direction : direction;
      CHECK(wire.end(end).why_ended().starts_with("TLS: "));
    }
  CHECK(found > 100);
}

CASE("a stream that is cut anywhere delivers what came before, and then ends broken") {
  Wire whole(20'000);
  whole.run();
  for (std::size_t at = 0; at < whole.gone_by(1); at += at < 1000 ? 31 : 1009) {
    Wire wire(20'000);
    wire.run([&](int from, std::size_t before, Bytes& bytes) {
      if (from == 1) bytes.resize(before >= at ? 0 : std::min(bytes.size(), at - before));
    });
    wire.cut();
    wire.run();
    for (int end : {0, 1}) CHECK(wire.status(end) == IoStatus::kBroken && wire.end(end).why_ended().empty());
  }
}

CASE("a record that is repeated, left out or exchanged with the next one ends the connection") {
  enum class What { kRepeat, kLeaveOut, kExchange };
  for (What what : {What::kRepeat, What::kLeaveOut, What::kExchange}) {
    Wire wire(60'000);
    bool done = false;
    wire.run([&](int from, std::size_t before, Bytes& bytes) {
      auto all = records(bytes);
      if (done || from != 1 || before == 0 || all.size() < 4) return;  // within the data
      done = true;
      bytes.clear();
      if (what == What::kRepeat) all.insert(all.begin() + 2, all[2]);
      if (what == What::kLeaveOut) all.erase(all.begin() + 2);
      if (what == What::kExchange) std::swap(all[2], all[3]);
      for (const Bytes& it : all) bytes.insert(bytes.end(), it.begin(), it.end());
    });
    CHECK(done && !wire.all_arrived());
    CHECK_EQ(wire.status(0), IoStatus::kBroken);
    CHECK(wire.end(0).why_ended().starts_with("TLS: bytes on the connection were changed on the way"));
  }
}

CASE("with another key no handshake succeeds, and both ends say so") {
  Wire wire(100, Digest{std::byte{1}});
  wire.run();
  for (int end : {0, 1}) {
    CHECK(wire.received(end).empty() && wire.status(end) == IoStatus::kBroken);
    CHECK(wire.end(end).why_ended().starts_with("TLS: the handshake failed: "));
  }
}

CASE("a peer that does not speak TLS, and one that stops in its handshake, are no reason to spin") {
  for (bool dialled : {false, true})
    for (std::string_view words : {"RINGDP: plain bytes of a frame, more than a record's head", "\x16\x03"}) {
      auto [outside, inside] = socket_pair();
      auto channel =
          make_tls_channel(make_tcp_channel(std::move(outside)), {.tls = context(), .key = {}, .dialled = dialled});
      Bytes room(100);
      const iovec piece{room.data(), room.size()};
      (void)::send(inside.get(), words.data(), words.size(), MSG_NOSIGNAL);
      const IoResult result = channel->receive(std::span(&piece, 1));
      CHECK_EQ(result.status, words.size() > 5 ? IoStatus::kBroken : IoStatus::kWouldBlock);
      if (words.size() > 5)
        CHECK(result.error_number == EBADMSG && !channel->why_ended().empty());
      else
        CHECK(!readable(channel->poll_fd()) && channel->send(std::span(&piece, 1)).status == IoStatus::kWouldBlock);
    }
}

CASE("what has been received counts as delivered, but for the last part, of which the peer has not told yet") {
  constexpr std::size_t kCount = 3'000'000;
  Wire wire(kCount);
  wire.run();
  CHECK(wire.all_arrived());
  for (int end : {0, 1}) CHECK(wire.end(end).path()->undelivered() < kTold + 16 * 1024);
}

CASE("bytes from anywhere, at either end and in any state, end the connection at worst") {
  for (unsigned seed = 0; seed < 400; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](std::size_t below) { return static_cast<std::size_t>(random()) % below; };
    Wire wire(3000);
    const int direction = static_cast<int>(draw(2));
    const std::size_t at = draw(seed % 2 == 0 ? 700 : 5000);
    wire.run([&](int from, std::size_t before, Bytes& bytes) {
      if (from != direction || at < before || at >= before + bytes.size()) return;
      Bytes junk(1 + draw(300));
      for (std::byte& it : junk) it = static_cast<std::byte>(random());
      if (draw(2) == 0) junk[0] = std::byte{static_cast<unsigned char>(20 + draw(5))};  // a type of record
      const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at - before);
      if (draw(2) == 0)
        bytes.insert(place, junk.begin(), junk.end());
      else
        std::copy_n(junk.begin(), std::min<std::size_t>(junk.size(), static_cast<std::size_t>(bytes.end() - place)),
                    place);
    });
  }
}

CASE("ranks make broken connections again, and go on with the same bits") {
  MemoryStore store;
  constexpr int kRanks = 3, kSteps = 40;
  run_ranks(kRanks, [&](int rank) {
    RendezvousOptions options = rendezvous_options(rank, kRanks);
    options.secret.assign(32, std::byte{7});
    options.links.transport = &tcp_transport();
    options.links.tls = context();
    auto runtime = std::make_shared<Runtime>(store, options, EngineOptions{});
    Rank self{rank, kRanks, runtime,
              std::make_unique<GroupHandle>(runtime, "everybody", everybody(kRanks), 20'000, kNeverSmall)};
    std::vector<float> first;
    for (int step = 0; step < kSteps; ++step) {
      std::vector<float> data = input_of(100'000, rank);
      const auto work = self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {});
      if (rank == 0 && step % 10 == 5)
        for (const int fd : connected_sockets()) shutdown(fd, SHUT_RDWR);
      self.wait(work);
      if (step == 0) first = data;
      CHECK(same_bits(data, first));
    }
    if (rank == 0) CHECK(runtime->engine().healing().healed() > 0);
    runtime->shut_down();
  });
}

}  // namespace ringdp::testing
