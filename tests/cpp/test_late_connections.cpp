// Connections that are made when they are needed, with ranks as threads: which pairs connect at the start, that either
// side may ask first for the others, and that ranks may leave meanwhile.

#include <atomic>
#include <chrono>
#include <thread>

#include "job.h"
#include "meet/connector.h"
#include "meet/rendezvous.h"
#include "transport/tcp.h"

namespace ringdp::testing {
namespace {

constexpr int kWorld = 11;  // those five apart are not connected from the start

void run_late(int world, const std::function<void(Rank&)>& body) {
  run_job(world, AlgorithmTable{}, body, 20'000, {}, 1);
}

void exchange_all(Rank& self, GroupHandle& group) {
  const auto world = static_cast<std::size_t>(self.world);
  std::vector<float> mine(world * 100), theirs(world * 100);
  std::vector<std::span<std::byte>> chunks, blocks;
  for (std::size_t peer = 0; peer < world; ++peer) {
    std::fill_n(mine.begin() + static_cast<std::ptrdiff_t>(peer * 100), 100,
                static_cast<float>(self.rank * 100) + peer);
    chunks.push_back(bytes_of(mine).subspan(peer * 400, 400));
    blocks.push_back(bytes_of(theirs).subspan(peer * 400, 400));
  }
  group.wait(*group.all_to_all(chunks, blocks, DType::kFloat32, {}));
  std::size_t wrong = 0;
  for (std::size_t peer = 0; peer < world; ++peer)
    wrong += theirs[peer * 100] != static_cast<float>(peer * 100) + static_cast<float>(self.rank);
  CHECK_EQ(wrong, std::size_t{0});
}

}  // namespace

CASE("the overlay is symmetric, connected, small, and has the tree's edges") {
  for (int world : {1, 2, 3, 5, 17, 64, 100, 1000}) {
    std::size_t most = 0;
    for (int a = 0; a < world; ++a) {
      std::size_t mine = 0;
      for (int b = 0; b < world; ++b) {
        const bool one = connected_from_start(a, b, world, 1);
        if (a == b) CHECK(!one);
        CHECK_EQ(one, connected_from_start(b, a, world, 1));
        mine += one ? 1 : 0;
        CHECK_EQ(connected_from_start(a, b, world, world), a != b);
      }
      most = std::max(most, mine);
      if (world > 1) CHECK(connected_from_start(a, (a + 1) % world, world, 1) || world == 1);
      if (a > 0) CHECK(connected_from_start(a, (a - 1) / 4, world, 1));
      for (int b : overlay_neighbours(a, world)) CHECK(connected_from_start(a, b, world, 1));
    }
    if (world == 64) CHECK(most <= 16);
    if (world == 1000) CHECK(most <= 25);
  }
}

CASE("a connection that another rank asks for just before all are connected is made afterwards") {
  int error_number = 0;
  auto listener = TcpListener::try_bind("127.0.0.1", 0, 16, error_number);
  REQUIRE(listener.has_value());
  const SocketAddress address = listener->address();
  const std::vector<std::byte> secret(32, std::byte{7});
  const auto connector = [&](uint32_t rank) {
    HandshakeFields mine;
    mine.to = rank;
    mine.world = 2;
    return Connector(mine, secret, {0, 0});  // neither needs the other at the start
  };
  Connector low = connector(0), high = connector(1);
  low.listener().listen_on([&] {
    std::vector<TcpListener> listeners;
    listeners.push_back(std::move(*listener));
    return listeners;
  }());
  high.set_route(0, {.addresses = {address}, .left_out = {}}, false);
  high.want(0);
  high.note_met(0);
  for (Deadline limit = Deadline::after_ms(5000); !(high.connected(0) && low.connected(1)) && !limit.expired();) {
    high.step(1);
    low.step(1);
  }
  CHECK(!high.take().empty());
  CHECK(!low.take().empty());
}

CASE("every pair at once, again and again, in jobs that are new each time") {
  for (int round = 0; round < 4; ++round)
    run_late(kWorld, [&](Rank& self) {
      exchange_all(self, *self.group);
      self.wait(self.group->barrier({}));
      exchange_all(self, *self.group);
    });
}

CASE("several groups, used by several threads of every rank") {
  run_late(kWorld, [&](Rank& self) {
    GroupHandle first(self.runtime, "first", everybody(kWorld), 20'000, AlgorithmTable{});
    GroupHandle second(self.runtime, "second", everybody(kWorld), 20'000, AlgorithmTable{});
    std::thread other([&] {
      for (int i = 0; i < 5; ++i) exchange_all(self, second);
    });
    for (int i = 0; i < 5; ++i) exchange_all(self, first);
    other.join();
  });
}

CASE("ranks leave while they are being connected: no failure for those that do not need them") {
  for (int round = 0; round < 4; ++round)
    run_late(kWorld, [&](Rank& self) {
      self.wait(self.group->barrier({}));
      // A group of a rank and the one five further on, with whom it is mostly not connected: made, and left at once by
      // some.
      std::vector<int> members{self.rank, (self.rank + 5) % kWorld};
      std::sort(members.begin(), members.end());
      GroupHandle pair(self.runtime, "pair", members, 5'000, AlgorithmTable{});
      if (self.rank % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(600 * round));
    });
}

CASE("a rank that is gone is an error for who needs it, soon") {
  std::atomic<bool> left{false};
  run_late(kWorld, [&](Rank& self) {
    std::vector<float> ring(100'000, 1.0F);
    self.wait(self.group->all_reduce(bytes_of(ring), DType::kFloat32, ReduceOp::kSum, {}));
    if (self.rank == 7) {
      self.group.reset();
      self.runtime->shut_down();
      left = true;
      return;
    }
    while (!left) std::this_thread::yield();
    if (self.rank != 2) return;
    std::vector<float> data(5, 1.0F);
    const auto begin = std::chrono::steady_clock::now();
    auto send = [&] { return self.group->send(bytes_of(data), DType::kFloat32, 7, 0, {}); };
    std::string message = CHECK_THROWS(ErrorKind::kPeerLost, self.wait(send()));
    CHECK(message.find("lost rank 7") != std::string::npos);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(8));
  });
}

}  // namespace ringdp::testing
