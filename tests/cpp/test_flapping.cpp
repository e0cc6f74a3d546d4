// Jobs whose connections are ended from outside, again and again, whichever it hits: several links at once, pairs with
// several connections, new ones that are just being made; while unauthenticated processes connect. Results keep their
// bits, nothing is left over.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "collective/compressed.h"
#include "job.h"
#include "meet/handshake.h"
#include "sockets.h"

using namespace ringdp;
using namespace ringdp::testing;

namespace {

using std::chrono::milliseconds;

constexpr std::size_t kCount = 24'000;  // elements, in as many parts as there are ranks
const std::vector<std::byte> kSecret(32, std::byte{7});

void run_flapping_job(int world, int streams, bool checksums, const std::function<void(Rank&)>& body) {
  MemoryStore store;
  run_ranks(world, [&](int rank) {
    RendezvousOptions options = rendezvous_options(rank, world);
    options.links.transport = &tcp_transport();
    options.host.id = std::to_string(rank);
    options.links.streams = streams;
    options.links.checksums = checksums;
    options.secret = kSecret;
    options.job = JobId{};
    auto runtime = std::make_shared<Runtime>(store, options, EngineOptions{});
    Rank self{rank, world, runtime,
              std::make_unique<GroupHandle>(runtime, "everybody", everybody(world), 20'000, AlgorithmTable{})};
    body(self);
  });
}

// A sum, messages to the next rank, blocks to all, a compressed sum, and a small sum; what they give, one after the
// other.
std::vector<std::vector<float>> everything(Rank& self) {
  const std::vector<float> input = input_of(kCount, self.rank);
  const auto world = self.world;
  std::vector<std::vector<float>> out(5, input);
  std::vector<float> sent = input, blocks = input;
  auto sum = self.group->all_reduce(bytes_of(out[0]), DType::kFloat32, ReduceOp::kSum, {});
  auto message = self.group->send(bytes_of(sent), DType::kFloat32, (self.rank + 1) % world, 0, {});
  self.wait(self.group->receive(bytes_of(out[1]), DType::kFloat32, (self.rank + world - 1) % world, 0, {}));
  self.wait(self.group->all_to_all(parts(blocks, world), parts(out[2], world), DType::kFloat32, {}));
  std::vector<CompressedSection> sections{{.x = out[3].data(), .count = out[3].size()}};
  self.wait(self.group->all_reduce_compressed(
      sections, {.codec = CodecId::kInt8, .divisor = static_cast<std::size_t>(world)}, {}));
  out[4].resize(100);
  self.wait(self.group->all_reduce(bytes_of(out[4]), DType::kFloat32, ReduceOp::kMax, {}));
  self.wait(sum);
  self.wait(message);
  return out;
}

// Ends one of this process's connections; false: there is none.
bool end_some_connection(std::mt19937& random) {
  const std::vector<int> sockets = connected_sockets();
  if (sockets.empty()) return false;
  const int fd = sockets[random() % sockets.size()];
  return connected_over_tcp(fd) && shutdown(fd, SHUT_RDWR) == 0;
}

// While it lives, a thread does something every few milliseconds.
class Meanwhile {
 public:
  Meanwhile(int every_ms, std::function<void(std::mt19937&)> what)
      : thread_([this, every_ms, what = std::move(what)] {
          std::mt19937 random(std::random_device{}());
          while (!stop_) {
            what(random);
            std::this_thread::sleep_for(milliseconds(1 + random() % static_cast<unsigned>(every_ms)));
          }
        }) {}
  ~Meanwhile() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// What `what` comes to when it has been looked at for as long as it may take.
template <class What>
bool soon(What&& what) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!what() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(milliseconds(2));
  return what();
}

// `rounds` of everything on all ranks while rank 0 has something done; afterwards as many descriptors as before.
void survive(int world, int streams, bool checksums, int rounds, int every_ms,
             const std::function<void(std::mt19937&)>& harm) {
  std::atomic<uint64_t> healed{0};
  run_flapping_job(world, streams, checksums, [&](Rank& self) {
    const auto wanted = everything(self);
    self.wait(self.group->barrier({}));
    std::size_t sockets = 0, before = 0;
    if (self.rank == 0) {
      sockets = connected_sockets().size();
      before = descriptors().size();
      CHECK_EQ(sockets, static_cast<std::size_t>(streams * world * (world - 1)));
    }
    self.wait(self.group->barrier({}));
    {
      std::optional<Meanwhile> meanwhile;
      if (self.rank == 0) meanwhile.emplace(every_ms, harm);
      for (int round = 0; round < rounds; ++round) CHECK(everything(self) == wanted);
      self.wait(self.group->barrier({}));
    }
    self.wait(self.group->barrier({}));
    CHECK(everything(self) == wanted);
    self.runtime->engine().healing().wait_until_whole(Deadline::after_ms(5000));
    healed += self.runtime->engine().healing().healed();
    self.wait(self.group->barrier({}));
    if (self.rank == 0) {
      CHECK(soon([&] { return connected_sockets().size() == sockets && descriptors().size() == before; }));
      CHECK_EQ(connected_sockets().size(), sockets);
      CHECK_EQ(descriptors().size(), before);
    }
    self.wait(self.group->barrier({}));
  });
  CHECK(healed > 0);
}

void cut(std::mt19937& random) { end_some_connection(random); }

// Connects to the listeners of this process, with the job's secret or without, and sends one of these messages.
void call_everybody(std::mt19937& random, std::vector<Fd>& slow) {
  for (const SocketAddress& address : listening_addresses()) {
    int error_number = 0;
    Fd socket = start_connect(address, error_number);
    if (!socket) continue;
    pollfd polled{socket.get(), POLLOUT, 0};
    poll(&polled, 1, 100);
    HandshakeFields fields;
    fields.type = random() % 4 == 0 ? HandshakeType::kKnock : static_cast<HandshakeType>(1 + random() % 6);
    fields.purpose = random() % 4 == 0 ? static_cast<Purpose>(random() % 9) : Purpose::kResume;
    fields.from = random() % 4;
    fields.to = random() % 3;
    fields.world = random() % 8 == 0 ? 2 : 3;
    fields.number = random() % 3 == 0 ? random() : random() % 5;  // an old one, one that was never given out
    fields.stream = static_cast<uint16_t>(random() % 2 == 0 ? 0 : random() % 40);
    if (random() % 4 == 0) fields.job[0] = std::byte{1};
    if (random() % 8 == 0) fields.epoch = 1;
    std::vector<std::byte> secret = kSecret;
    if (random() % 4 == 0) secret[0] = std::byte{0};
    HandshakeMessage message = encode_handshake(fields, secret, {});
    if (random() % 4 == 0)
      for (auto& it : message) it = static_cast<std::byte>(random());
    const std::size_t bytes = random() % 3 == 0 ? random() % message.size() : message.size();
    ::send(socket.get(), message.data(), bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (random() % 2 == 0) ::send(socket.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (random() % 2 == 0) slow.push_back(std::move(socket));  // it says no more, and stays
  }
  if (slow.size() > 40) slow.erase(slow.begin(), slow.begin() + 20);
}

}  // namespace

CASE("four ranks, whose connections end several at once") { survive(4, 1, false, 12, 10, cut); }

CASE("pairs with several connections have them all again") { survive(2, 4, false, 25, 25, cut); }

CASE("three ranks with several connections and checksums") { survive(3, 3, true, 15, 40, cut); }

// The caller's own sockets are in the same process, and are ended as well.
CASE("strangers, and calls that were recorded, while connections heal") {
  std::atomic<uint64_t> healed{0};
  run_flapping_job(3, 1, false, [&](Rank& self) {
    const auto wanted = everything(self);
    self.wait(self.group->barrier({}));
    {
      std::vector<Fd> slow;
      std::optional<Meanwhile> harm, strangers;
      if (self.rank == 0) {
        harm.emplace(20, cut);
        strangers.emplace(5, [&](std::mt19937& random) { call_everybody(random, slow); });
      }
      for (int round = 0; round < 12; ++round) CHECK(everything(self) == wanted);
      self.wait(self.group->barrier({}));
    }
    self.runtime->engine().healing().wait_until_whole(Deadline::after_ms(5000));
    healed += self.runtime->engine().healing().healed();
    CHECK(everything(self) == wanted);
  });
  CHECK(healed > 0);
}
