// How ranks of a host come to share memory: several of them stepped by one thread, in the order that a case wants, over
// socket pairs in the place of their TCP connections.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>

#include "base/bytes.h"
#include "base/sha256.h"
#include "base/text.h"
#include "shared/shared_setup.h"
#include "testing.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace ringdp::testing {
namespace {

constexpr std::size_t kRing = PairMemory::kMinRingBytes;

// Every rank's sockets to every other.
std::vector<std::vector<PeerSocket>> connected(int world) {
  std::vector<std::vector<PeerSocket>> sockets(world);
  for (auto& it : sockets) it.resize(world);
  for (int low = 0; low < world; ++low)
    for (int high = low + 1; high < world; ++high) {
      int ends[2];
      REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
      sockets[low][high] = Fd(ends[0]);
      sockets[high][low] = PeerSocket(Fd(ends[1]), {.dialled = true});
    }
  return sockets;
}

const TransportChoice kShareIfPossible{&shm_transport(), &tcp_transport(), false};
const TransportChoice kMustShare{&shm_transport(), &tcp_transport(), true};
const TransportChoice kNothingToSetUp{&tcp_transport(), &tcp_transport(), false};

SharedSetup::Plan plan_for(int world, int rank) {
  SharedSetup::Plan plan;
  plan.transports.resize(world, kShareIfPossible);
  plan.transports[rank] = {};
  plan.pids.resize(world, getpid());
  plan.ring_bytes = kRing;
  return plan;
}

bool shares(const SharedSetup& it, int peer) { return &it.transport(peer) == &shm_transport(); }

using Ranks = std::vector<std::unique_ptr<SharedSetup>>;

bool all_complete(const Ranks& ranks) {
  for (const auto& it : ranks)
    if (!it->complete()) return false;
  return true;
}

void step_all(const Ranks& ranks, const std::function<bool()>& until) {
  Deadline deadline = Deadline::after_ms(10'000);
  while (!until()) {
    REQUIRE(!deadline.expired());
    for (const auto& it : ranks)
      if (it) it->step(1);
  }
}

void expect_in(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) report_failure(__FILE__, __LINE__, "'" + text + "' without '" + part + "'");
}

// The doors of this process, found where any user of the host can see all of them.
std::set<std::string> doors() {
  std::set<std::string> own, names;
  for (const auto& it : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    std::string target = std::filesystem::read_symlink(it.path(), gone).string();
    if (target.starts_with("socket:[")) own.insert(target.substr(8, target.size() - 9));
  }
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string inode;
    for (int i = 0; i < 7; ++i) words >> inode;
    auto at = line.find("@ringdp/");
    if (at != std::string::npos && own.contains(inode)) names.insert(line.substr(at + 8, 32));
  }
  return names;
}

Fd visit(const std::string& hex) {
  SharedToken name{};
  auto bytes = hex_decode(hex);
  std::copy(bytes.begin(), bytes.end(), name.begin());
  int error_number = 0;
  Fd fd = connect_fd_socket(name, error_number);
  CHECK_EQ(error_number, 0);
  return fd;
}

}  // namespace

CASE("all pairs of a host share memory, whoever is first") {
  for (int world : {2, 3, 5}) {
    for (bool backwards : {false, true}) {
      auto sockets = connected(world);
      Ranks ranks(world);
      for (int i = 0; i < world; ++i) {
        int rank = backwards ? world - 1 - i : i;
        ranks[rank] = std::make_unique<SharedSetup>(rank, std::move(sockets[rank]), plan_for(world, rank));
        for (const auto& it : ranks)
          if (it) it->step(0);
      }
      step_all(ranks, [&] { return all_complete(ranks); });
      for (int rank = 0; rank < world; ++rank)
        for (int peer = 0; peer < world; ++peer) {
          CHECK(peer == rank || shares(*ranks[rank], peer));
          CHECK_EQ(ranks[rank]->problem(peer), std::string());
        }
    }
  }
  CHECK(doors().empty());
}

CASE("nothing to share: complete when all ranks are, and not before") {
  for (int world : {1, 2, 5, 6, 23}) {
    for (int late = 0; late < world; late += 3) {
      auto sockets = connected(world);
      Ranks ranks(world);
      auto begin = [&](int rank) {
        SharedSetup::Plan plan = plan_for(world, rank);
        plan.transports.assign(world, kNothingToSetUp);
        ranks[rank] = std::make_unique<SharedSetup>(rank, std::move(sockets[rank]), std::move(plan));
      };
      for (int rank = 0; rank < world; ++rank)
        if (rank != late) begin(rank);
      for (int i = 0; i < 8; ++i)
        for (const auto& it : ranks)
          if (it) it->step(0);
      for (const auto& it : ranks) CHECK(!it || (it->decided() && !it->complete() && !it->awaited().empty()));
      begin(late);
      step_all(ranks, [&] { return all_complete(ranks); });
      for (const auto& it : ranks) CHECK(!it->failure() && it->awaited().empty());
    }
  }
}

CASE("who is not the process that the store names gets no memory, and both ranks say the same") {
  for (int suspicious : {0, 1}) {
    auto sockets = connected(2);
    Ranks ranks;
    for (int rank : {0, 1}) {
      SharedSetup::Plan plan = plan_for(2, rank);
      if (rank == suspicious) plan.pids[1 - rank] = 1;
      ranks.push_back(std::make_unique<SharedSetup>(rank, std::move(sockets[rank]), std::move(plan)));
    }
    step_all(ranks, [&] { return all_complete(ranks); });
    CHECK(!shares(*ranks[0], 1) && !shares(*ranks[1], 0));
    expect_in(ranks[0]->problem(1),
              "came in the place of rank " + std::to_string(1 - suspicious) + ", which is process 1");
    CHECK_EQ(ranks[0]->problem(1), ranks[1]->problem(0));
  }
}

CASE("a maker that stops keeps nobody for long: the other decides, and it agrees later") {
  auto sockets = connected(2);
  SharedSetup maker(0, std::move(sockets[0]), plan_for(2, 0));  // has made its offer, and stops
  SharedSetup::Plan plan = plan_for(2, 1);
  plan.patience_ms = 50;
  SharedSetup fetcher(1, std::move(sockets[1]), std::move(plan));
  Deadline limit = Deadline::after_ms(5000);
  while (fetcher.problem(0).empty() && !limit.expired()) fetcher.step(10);
  expect_in(fetcher.problem(0), "rank 0 did not hand the memory out in time");
  CHECK(!fetcher.complete());  // the maker may be dead for all it knows
  maker.step(0);
  maker.step(0);
  fetcher.step(0);
  CHECK(maker.complete() && fetcher.complete());
  CHECK_EQ(maker.problem(1), fetcher.problem(0));
  CHECK(!shares(maker, 1) && !shares(fetcher, 0));
}

CASE("memory goes to who shows the token, whatever strangers do at the door") {
  auto sockets = connected(2);
  SharedSetup maker(0, std::move(sockets[0]), plan_for(2, 0));
  auto open = doors();
  REQUIRE(open.size() == 1);
  std::vector<Fd> strangers;
  for (int i = 0; i < 100; ++i) strangers.push_back(visit(*open.begin()));  // and send no bytes
  maker.step(0);
  CHECK(maker.turned_away() == 0 && doors() == open);
  SharedMessage guess;
  guess.type = SharedType::kToken;
  Fd guessing = visit(*open.begin()), babbling = visit(*open.begin()), demanding = visit(*open.begin());
  CHECK_EQ(send_shared_message(guessing.get(), guess), 0);
  std::array<char, 300> babble{};
  CHECK_EQ(send(babbling.get(), babble.data(), babble.size(), MSG_NOSIGNAL), 300);
  guess.type = SharedType::kAccepted;
  CHECK_EQ(send_shared_message(demanding.get(), guess), 0);
  maker.step(0);
  SharedReader reader;
  for (Fd* it : {&guessing, &babbling, &demanding}) {
    CHECK(reader.read(it->get()) == SharedReader::Status::kClosed);
    CHECK(!reader.take_descriptor());
  }
  CHECK(reader.read(strangers.front().get()) == SharedReader::Status::kClosed);  // the oldest made room
  SharedSetup fetcher(1, std::move(sockets[1]), plan_for(2, 1));
  Deadline limit = Deadline::after_ms(5000);
  while (!(maker.complete() && fetcher.complete()) && !limit.expired()) {
    maker.step(1);
    fetcher.step(1);
  }
  CHECK(shares(maker, 1) && shares(fetcher, 0));
  CHECK(maker.turned_away() >= 39);
}

CASE("silent strangers are sent away after two seconds, and do not hold anybody up") {
  std::string problem;
  auto fd_socket = FdSocket::open(problem);
  REQUIRE(fd_socket.has_value());
  Fd silent = visit(hex_encode(fd_socket->name()));
  Deadline limit = Deadline::after_ms(30'000);  // a busy machine
  auto begin = Clock::now();
  while (fd_socket->turned_away() == 0 && !limit.expired()) {
    std::vector<pollfd> polled;
    fd_socket->poll_for(polled);
    poll(polled.data(), polled.size(), 10);
    CHECK(fd_socket->serve().empty());
  }
  auto took = Clock::now() - begin;
  CHECK_EQ(fd_socket->turned_away(), 1);
  CHECK(took > std::chrono::milliseconds(1900));
}

CASE("a token is good once") {
  std::string problem;
  auto fd_socket = FdSocket::open(problem);
  REQUIRE(fd_socket.has_value());
  SharedMessage message;
  message.type = SharedType::kToken;
  random_bytes(message.token);
  fd_socket->expect(message.token, 7);
  Fd first = visit(hex_encode(fd_socket->name())), second = visit(hex_encode(fd_socket->name()));
  CHECK_EQ(send_shared_message(first.get(), message), 0);
  CHECK_EQ(send_shared_message(second.get(), message), 0);
  auto clients = fd_socket->serve();
  REQUIRE(clients.size() == 1);
  CHECK_EQ(clients[0].peer, 7);
  CHECK(clients[0].credentials.pid == getpid() && clients[0].credentials.uid == geteuid());
}

CASE("more descriptors than one with a message are closed") {
  int ends[2], other[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  REQUIRE(pipe2(other, O_CLOEXEC) == 0);
  Fd left(ends[0]), right(ends[1]), reading(other[0]), writing(other[1]);
  SharedBytes bytes = SharedMessage{}.encode();
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(2 * sizeof(int))> control{};
  iovec piece{bytes.data(), bytes.size()};
  msghdr header{};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  cmsghdr* rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(2 * sizeof(int));
  std::memcpy(CMSG_DATA(rights), other, sizeof(other));
  REQUIRE(sendmsg(left.get(), &header, 0) == static_cast<ssize_t>(bytes.size()));
  {
    SharedReader reader;
    CHECK(reader.read(right.get()) == SharedReader::Status::kMessage);
    writing.reset();
    char byte = 0;
    CHECK(fcntl(reading.get(), F_SETFL, O_NONBLOCK) == 0 && read(reading.get(), &byte, 1) == -1);  // one is held
    CHECK(static_cast<bool>(reader.take_descriptor()));
  }
  char byte = 0;
  CHECK_EQ(read(reading.get(), &byte, 1), 0);  // no other process has the writing end
}

CASE("whichever connections end, and whenever: others take their place, and all agree") {
  for (const auto& [world, memory] : {std::pair(2, false), {3, false}, {7, false}, {2, true}, {3, true}, {6, true}})
    for (unsigned seed = 0; seed < 40; ++seed) {
      std::mt19937 random(seed);
      const auto draw = [&](int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); };
      std::map<std::pair<int, int>, Fd> wires;  // one end of each pair's, by the lower rank and the higher one
      auto sockets = connected(world);
      Ranks ranks;
      for (int rank = 0; rank < world; ++rank) {
        for (int higher = rank + 1; higher < world; ++higher)
          wires[{rank, higher}] = Fd(dup(sockets[rank][higher].get()));
        SharedSetup::Plan plan = plan_for(world, rank);
        if (!memory) plan.transports.assign(world, kNothingToSetUp);
        plan.round_trip_us = rank == 1 ? 64 : 0;
        ranks.push_back(std::make_unique<SharedSetup>(rank, std::move(sockets[rank]), std::move(plan)));
      }
      // As the ranks' connectors do: a rank that is ready says so, all others get another connection.
      const auto mend = [&](int rank, int peer) {
        if (ranks[peer]->complete()) return ranks[rank]->note_met(peer, ranks[peer]->round_trip_us());
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
        wires[std::minmax(rank, peer)] = Fd(dup(ends[0]));
        ranks[rank]->reconnect(peer, PeerSocket(Fd(ends[0]), {.dialled = rank > peer}));
        ranks[peer]->reconnect(rank, PeerSocket(Fd(ends[1]), {.dialled = peer > rank}));
      };
      int cuts = draw(20);
      Deadline limit = Deadline::after_ms(10'000);
      while (!all_complete(ranks)) {
        REQUIRE(!limit.expired());
        if (cuts > 0 && draw(3) == 0) {
          shutdown(std::next(wires.begin(), draw(static_cast<int>(wires.size())))->second.get(),
                   draw(2) == 0 ? SHUT_RDWR : SHUT_WR);
          --cuts;
        }
        const int rank = draw(world);
        if (ranks[rank]->complete()) continue;
        ranks[rank]->step(0);
        REQUIRE(!ranks[rank]->failure());
        for (int peer : ranks[rank]->take_cut()) mend(rank, peer);
      }
      for (int rank = 0; rank < world; ++rank)
        for (int peer = 0; peer < world; ++peer)
          CHECK(ranks[rank]->round_trip_us() == 64 && (peer == rank || shares(*ranks[rank], peer) == memory));
    }
}

CASE("a rank that dies on the way is named, wherever it had got to") {
  for (int steps = 0; steps < 4; ++steps) {
    auto sockets = connected(3);
    Ranks ranks;
    for (int rank = 0; rank < 3; ++rank)
      ranks.push_back(std::make_unique<SharedSetup>(rank, std::move(sockets[rank]), plan_for(3, rank)));
    for (int i = 0; i < steps; ++i) ranks[1]->step(0);
    if (ranks[1]->complete()) break;
    ranks[1].reset();
    // Where memory is shared it has died; otherwise it may be the network.
    std::set<int> noticed;
    step_all(ranks, [&] {
      for (int rank : {0, 2}) {
        for (int peer : ranks[rank]->take_cut())
          if (peer == 1) noticed.insert(rank);
        if (ranks[rank]->failure()) noticed.insert(rank);
      }
      return noticed.size() == 2;
    });
    for (int rank : {0, 2}) {
      CHECK(!ranks[rank]->complete());
      if (const auto& found = ranks[rank]->failure()) CHECK(found->peer == 1 && found->lost);
    }
  }
}

CASE("the death of a rank that is ready is heard while another is not") {
  for (int dead : {1, 2}) {  // rank 5 reports to rank 1, which has nothing else to wait for
    auto sockets = connected(6);
    Ranks ranks(6);
    for (int rank = 0; rank < 5; ++rank) {
      SharedSetup::Plan plan = plan_for(6, rank);
      plan.transports.assign(6, kNothingToSetUp);
      ranks[rank] = std::make_unique<SharedSetup>(rank, std::move(sockets[rank]), std::move(plan));
    }
    step_all(ranks, [&] { return ranks[0]->awaited() == std::vector<int>{1}; });
    CHECK_EQ(ranks[1]->awaited(), std::vector<int>{5});
    CHECK_EQ(ranks[4]->awaited(), std::vector<int>{0});
    ranks[dead].reset();
    std::vector<int> ended;
    step_all(ranks, [&] {
      if (ended.empty()) ended = ranks[0]->take_cut();
      return !ended.empty();
    });
    CHECK_EQ(ended, std::vector<int>{dead});
  }
}

CASE("nobody is ready while what is required could not be") {
  auto sockets = connected(3);
  Ranks ranks;
  for (int rank = 0; rank < 3; ++rank) {
    SharedSetup::Plan plan = plan_for(3, rank);
    plan.transports.assign(3, kNothingToSetUp);
    if (rank < 2) plan.transports[1 - rank] = kMustShare;
    if (rank == 0) plan.pids[1] = 1;
    ranks.push_back(std::make_unique<SharedSetup>(rank, std::move(sockets[rank]), std::move(plan)));
  }
  step_all(ranks, [&] { return !ranks[0]->problem(1).empty() && !ranks[1]->problem(0).empty(); });
  for (int i = 0; i < 10; ++i)
    for (const auto& it : ranks) it->step(0);
  for (const auto& it : ranks) CHECK(!it->complete() && !it->failure());
  CHECK_EQ(ranks[2]->awaited(), (std::vector<int>{0}));
}

CASE("what is no part of the set-up is an objection, not a death") {
  for (int kind = 0; kind < 5; ++kind) {
    auto sockets = connected(2);
    Fd peer = std::move(sockets[0][1].fd);
    SharedSetup::Plan plan = plan_for(2, 1);
    SharedSetup self(1, std::move(sockets[1]), std::move(plan));
    SharedBytes raw{};
    SharedMessage message;
    message.type = std::array{SharedType::kOffer, SharedType::kReady, SharedType::kAccepted, SharedType::kOffer,
                              SharedType::kAllReady}[static_cast<std::size_t>(kind)];
    message.ring_bytes = kRing + 1;
    if (kind > 0) raw = message.encode();
    SharedMac({}, false).sign(raw);
    CHECK_EQ(send(peer.get(), raw.data(), raw.size(), 0), static_cast<ssize_t>(raw.size()));
    self.step(0);
    REQUIRE(self.failure().has_value());
    CHECK(self.failure()->peer == 0 && !self.failure()->lost);
  }
}

CASE("a message that was changed, repeated, left out, or is of another connection ends its connection") {
  enum class What { kNone, kChanged, kRepeated, kLeftOut, kOtherKey, kOwn };
  for (What what : {What::kNone, What::kChanged, What::kRepeated, What::kLeftOut, What::kOtherKey, What::kOwn}) {
    auto sockets = connected(2);
    Fd peer = std::move(sockets[0][1].fd);
    Digest key{std::byte{1}};
    sockets[1][0].protection.key = key;
    SharedSetup self(1, std::move(sockets[1]), plan_for(2, 1));
    if (what == What::kOtherKey) key[31] ^= std::byte{1};
    SharedMac mac(key, what == What::kOwn);  // as if its own message came back
    SharedBytes raw = SharedMessage{.reason = "no memory"}.encode();
    if (what == What::kLeftOut) mac.sign(raw);
    mac.sign(raw);
    if (what == What::kChanged) raw[60] ^= std::byte{1};
    for (int times = what == What::kRepeated ? 2 : 1; times > 0; --times)
      CHECK_EQ(send(peer.get(), raw.data(), raw.size(), 0), static_cast<ssize_t>(raw.size()));
    for (int i = 0; i < 3; ++i) self.step(0);
    const bool believed = what == What::kNone || what == What::kRepeated;  // the first
    CHECK_EQ(self.problem(0), believed ? std::string("no memory") : std::string());
    CHECK_EQ(self.take_cut().size(), what == What::kNone ? std::size_t{0} : std::size_t{1});
    CHECK(!self.failure());
  }
}

CASE("a refusal without words still is one") {
  auto sockets = connected(2);
  Fd peer = std::move(sockets[0][1].fd);
  SharedSetup self(1, std::move(sockets[1]), plan_for(2, 1));
  SharedBytes refusal = SharedMessage{}.encode();
  SharedMac({}, false).sign(refusal);
  CHECK_EQ(send(peer.get(), refusal.data(), refusal.size(), 0), static_cast<ssize_t>(refusal.size()));
  self.step(0);
  CHECK(!shares(self, 0));
  CHECK_EQ(self.problem(0), std::string("no reason was given"));
}

CASE("messages keep what they say, cut to what fits; anything else is none") {
  SharedMessage message;
  message.type = SharedType::kOffer;
  message.ring_bytes = 1 << 20;
  random_bytes(message.name);
  random_bytes(message.token);
  message.reason.assign(500, 'x');
  SharedBytes raw = message.encode();
  auto read = SharedMessage::decode(raw);
  REQUIRE(read.has_value());
  CHECK(read->type == message.type && read->ring_bytes == message.ring_bytes && read->name == message.name);
  CHECK(read->token == message.token && read->reason == std::string(168, 'x'));
  for (std::size_t at : {0, 7, 9, 11}) {
    SharedBytes other = raw;
    other[at] ^= std::byte{0x55};
    CHECK(!SharedMessage::decode(other));
  }
  raw[60] = std::byte{0xff};  // no UTF-8
  CHECK(SharedMessage::decode(raw)->reason.find('\xff') == std::string::npos);
}

CASE("a rank has at most 8 MiB in all, until there are very many") {
  CHECK_EQ(shared_ring_bytes(1), std::size_t{1} << 20);
  CHECK_EQ(shared_ring_bytes(2), std::size_t{1} << 20);
  CHECK_EQ(shared_ring_bytes(5), std::size_t{1} << 20);
  CHECK_EQ(shared_ring_bytes(6), std::size_t{1} << 19);
  CHECK_EQ(shared_ring_bytes(1000), kRing);
  for (std::size_t ranks = 2; ranks <= 65; ++ranks) {
    std::size_t ring = shared_ring_bytes(static_cast<int>(ranks));
    CHECK(std::has_single_bit(ring) && 2 * ring * (ranks - 1) <= std::size_t{8} << 20);
  }
}

CASE("ranks in words") {
  CHECK_EQ(ranks_text(std::vector<int>{3}), std::string("rank 3"));
  CHECK_EQ(ranks_text(std::vector<int>{0, 1}), std::string("ranks 0 and 1"));
  CHECK_EQ(ranks_text(std::vector<int>{0, 1, 2}), std::string("ranks 0-2"));
  CHECK_EQ(ranks_text(std::vector<int>{0, 1, 2, 5, 7, 8}), std::string("ranks 0-2, 5, 7 and 8"));
}

}  // namespace ringdp::testing
