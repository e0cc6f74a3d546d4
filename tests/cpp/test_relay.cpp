// Relay and TlsBridge: what goes in on one side comes out on the other, whole and in order, for any sizes and any order
// of reading, writing and ending; an end that breaks ends the pair, and nothing stays open.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "testing.h"
#include "transport/relay.h"
#include "transport/tcp.h"
#include "transport/tls_bridge.h"

namespace ringdp::testing {
namespace {

using std::chrono::milliseconds;

std::array<Fd, 2> tcp_pair() {
  int error_number = 0;
  auto listener = TcpListener::try_bind("127.0.0.1", 0, 4, error_number);
  REQUIRE(listener);
  Fd dialled = start_connect(listener->address(), error_number);
  REQUIRE(error_number == 0);
  pollfd polled{listener->poll_fd(), POLLIN, 0};
  REQUIRE(poll(&polled, 1, 5000) == 1);
  auto accepted = listener->accept(error_number);
  REQUIRE(accepted);
  pollfd connected{dialled.get(), POLLOUT, 0};
  REQUIRE(poll(&connected, 1, 5000) == 1);
  return {std::move(dialled), std::move(accepted->first)};
}

// One end of a relayed pair, as a program uses it: sends `total` bytes that both ends can compute, reads as many of the
// other's, and says that it has sent all.
class End {
 public:
  End(Fd socket, uint64_t seed, std::size_t sends, std::size_t receives)
      : socket_(std::move(socket)), seed_(seed), sends_(sends), receives_(receives), random_(seed) {
    fcntl(socket_.get(), F_SETFL, fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  }

  bool over() const { return told_ && ended_; }
  int fd() const { return socket_.get(); }

  void step(uint64_t other) {
    std::vector<std::byte> piece(1 + random_() % 70'000);
    if (sent_ < sends_ && random_() % 4 != 0) {
      const std::size_t count = std::min(piece.size(), sends_ - sent_);
      for (std::size_t i = 0; i < count; ++i) piece[i] = byte_at(seed_, sent_ + i);
      const ssize_t sent = ::send(socket_.get(), piece.data(), count, MSG_NOSIGNAL);
      if (sent > 0) sent_ += static_cast<std::size_t>(sent);
      REQUIRE((sent > 0 || errno == EAGAIN));
    }
    if (sent_ == sends_ && !told_) {
      shutdown(socket_.get(), SHUT_WR);
      told_ = true;
    }
    if (random_() % 3 == 0) return;
    const ssize_t got = ::recv(socket_.get(), piece.data(), piece.size(), 0);
    for (ssize_t i = 0; i < got; ++i)
      REQUIRE(piece[static_cast<std::size_t>(i)] == byte_at(other, received_ + static_cast<std::size_t>(i)));
    if (got > 0) received_ += static_cast<std::size_t>(got);
    if (got == 0) {
      REQUIRE(received_ == receives_);
      ended_ = true;
    }
    REQUIRE((got >= 0 || errno == EAGAIN));
  }

 private:
  static std::byte byte_at(uint64_t seed, std::size_t place) {
    return static_cast<std::byte>((seed * 2654435761U + place * 31 + place / 251) & 0xff);
  }

  Fd socket_;
  const uint64_t seed_;
  const std::size_t sends_, receives_;
  std::mt19937_64 random_;
  std::size_t sent_ = 0, received_ = 0;
  bool told_ = false, ended_ = false;
};

void run_to_the_end(std::vector<std::array<End, 2>>& pairs, uint64_t seed) {
  const auto until = Clock::now() + std::chrono::seconds(60);
  for (bool busy = true; busy;) {
    REQUIRE(Clock::now() < until);
    busy = false;
    for (std::size_t i = 0; i < pairs.size(); ++i)
      for (std::size_t side : {0U, 1U}) {
        End& end = pairs[i][side];
        if (end.over()) continue;
        busy = true;
        end.step(seed + 2 * i + 1 - side);
      }
  }
}

template <class Eventually>
void wait_until(Eventually condition) {
  const auto until = Clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    REQUIRE(Clock::now() < until);
    std::this_thread::sleep_for(milliseconds(2));
  }
}

CASE("relayed bytes arrive whole and in order") {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    Relay relay;
    std::mt19937_64 random(seed);
    std::vector<std::array<End, 2>> pairs;
    for (uint64_t i = 0; i < 5; ++i) {
      auto left = tcp_pair(), right = tcp_pair();
      relay.join(std::move(left[1]), std::move(right[1]));
      const std::size_t there = random() % 3 == 0 ? 0 : random() % 3'000'000, back = random() % 300'000;
      pairs.push_back({End(std::move(left[0]), 100 * seed + 2 * i, there, back),
                       End(std::move(right[0]), 100 * seed + 2 * i + 1, back, there)});
    }
    run_to_the_end(pairs, 100 * seed);
    pairs.clear();
    wait_until([&] { return relay.counts().pairs == 0; });
  }
}

CASE("a side that breaks ends its pair alone") {
  Relay relay;
  auto left = tcp_pair(), right = tcp_pair(), other_left = tcp_pair(), other_right = tcp_pair();
  relay.join(std::move(left[1]), std::move(right[1]));
  relay.join(std::move(other_left[1]), std::move(other_right[1]));
  const linger at_once{1, 0};
  setsockopt(left[0].get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  left[0].reset();  // a reset
  std::byte byte{};
  wait_until([&] {
    const ssize_t got = recv(right[0].get(), &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN);
  });
  wait_until([&] { return relay.counts().pairs == 1; });
  REQUIRE(send(other_left[0].get(), &byte, 1, MSG_NOSIGNAL) == 1);
  wait_until([&] { return recv(other_right[0].get(), &byte, 1, MSG_DONTWAIT) == 1; });
}

CASE("a relay that ends closes what it has") {
  auto left = tcp_pair(), right = tcp_pair();
  {
    Relay relay;
    relay.join(std::move(left[1]), std::move(right[1]));
  }
  std::byte byte{};
  for (const Fd* end : {&left[0], &right[0]})
    wait_until([&] { return recv(end->get(), &byte, 1, MSG_DONTWAIT) == 0 || errno == ECONNRESET; });
}

CASE("what two bridges carry arrives whole and in order") {
  const Digest key{};
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    TlsBridge one({.mode = TlsMode::kSecret}), other({.mode = TlsMode::kSecret});
    std::vector<std::array<End, 2>> pairs;
    std::mt19937_64 random(seed);
    for (uint64_t i = 0; i < 3; ++i) {
      auto left = tcp_pair(), right = tcp_pair(), between = tcp_pair();
      one.join(std::move(left[1]), std::move(between[0]), key, true);
      other.join(std::move(right[1]), std::move(between[1]), key, false);
      const std::size_t there = random() % 2'000'000, back = random() % 200'000;
      pairs.push_back({End(std::move(left[0]), 100 * seed + 2 * i, there, back),
                       End(std::move(right[0]), 100 * seed + 2 * i + 1, back, there)});
    }
    run_to_the_end(pairs, 100 * seed);
  }
}

CASE("bridges with other keys carry nothing") {
  TlsBridge one({.mode = TlsMode::kSecret}), other({.mode = TlsMode::kSecret});
  auto left = tcp_pair(), right = tcp_pair(), between = tcp_pair();
  Digest key{};
  one.join(std::move(left[1]), std::move(between[0]), key, true);
  key[0] = std::byte{1};
  other.join(std::move(right[1]), std::move(between[1]), key, false);
  std::byte byte{};
  send(left[0].get(), &byte, 1, MSG_NOSIGNAL);
  for (const Fd* end : {&left[0], &right[0]})
    wait_until([&] {
      const ssize_t got = recv(end->get(), &byte, 1, MSG_DONTWAIT);
      REQUIRE(got <= 0);
      return got == 0 || errno == ECONNRESET;
    });
}

}  // namespace
}  // namespace ringdp::testing
