// Connections that break and are made again, with ranks as threads: cut at any byte and in either direction, under
// every algorithm, the results have the same bits. RINGDP_CUTS=N cuts at N places of each; 0 at every byte of jobs
// with few elements, and at 200 places of long ones.
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>

#include "collective/compressed.h"
#include "cut_channel.h"
#include "job.h"
#include "transport/tcp.h"

using namespace ringdp;
using namespace ringdp::testing;

namespace {

constexpr auto kSoon = std::chrono::seconds(3);  // with a sanitizer, on a busy machine; 10 ms are usual

constexpr std::size_t kShort = 2000;  // elements
constexpr std::size_t kFew = 60;      // that a short job has where it is cut at every byte

struct Trial {
  const char* name;
  int world;
  std::vector<int> hosts;
  AlgorithmTable table;
  std::size_t count;  // of elements of the buffer
  std::function<void(Rank&, std::vector<float>&, std::vector<float>&)> run;
  std::size_t segment_bytes = kSegmentBytes;
};

void all_reduce(Rank& self, std::vector<float>& data, std::vector<float>&) {
  self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
}
void reduce(Rank& self, std::vector<float>& data, std::vector<float>&) {
  self.wait(self.group->reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, 0, {}));
}
void broadcast(Rank& self, std::vector<float>& data, std::vector<float>&) {
  self.wait(self.group->broadcast(bytes_of(data), DType::kFloat32, 0, {}));
}
void reduce_scatter(Rank& self, std::vector<float>& data, std::vector<float>& out) {
  out.resize(data.size() / static_cast<std::size_t>(self.world));
  self.wait(self.group->reduce_scatter(parts(data, self.world), bytes_of(out), DType::kFloat32, ReduceOp::kSum, {}));
}
void all_to_all(Rank& self, std::vector<float>& data, std::vector<float>& out) {
  out.resize(data.size());
  self.wait(self.group->all_to_all(parts(data, self.world), parts(out, self.world), DType::kFloat32, {}));
}
void messages(Rank& self, std::vector<float>& data, std::vector<float>& out) {
  out.resize(data.size());
  auto sent = self.group->send(bytes_of(data), DType::kFloat32, (self.rank + 1) % self.world, 0, {});
  self.wait(self.group->receive(bytes_of(out), DType::kFloat32, (self.rank + self.world - 1) % self.world, 0, {}));
  self.wait(sent);
}
void codes(Rank& self, std::vector<float>& data, std::vector<float>&) {
  std::vector<CompressedSection> sections{{.x = data.data(), .count = data.size()}};
  self.wait(self.group->all_reduce_compressed(
      sections, {.codec = CodecId::kInt8, .divisor = static_cast<std::size_t>(self.world)}, {}));
}
// Many small ones at once, whose buffers are used again at once.
void crowd(Rank& self, std::vector<float>& data, std::vector<float>& out) {
  out.assign(8 * 100, static_cast<float>(self.rank));
  for (int round = 0; round < 4; ++round) {
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < 8; ++i)
      works.push_back(self.group->all_reduce(bytes_of(out).subspan(i * 400, 400), DType::kFloat32, ReduceOp::kSum, {}));
    for (auto& work : works) self.wait(work);
    for (float& it : out) it = it * 0.5F + static_cast<float>(self.rank);
  }
  all_reduce(self, data, out);
}

const std::vector<Trial> kTrials{
    {"ring of two", 2, {0, 1}, kNeverSmall, 1000, all_reduce},
    {"ring of three, short frames", 3, {0, 1, 2}, kNeverSmall, 1000, all_reduce, 1024},
    {"fold of two", 2, {0, 1}, kFoldAlways, 1000, all_reduce},
    {"large fold of two", 2, {0, 1}, kFoldAlways, 200'000, all_reduce},
    {"fold of three", 3, {0, 1, 2}, kFoldAlways, 1000, all_reduce},
    {"in pairs", 3, {0, 1, 2}, kInPairs, 40'000, all_reduce},
    {"tree of four", 4, {0, 1, 2, 3}, kTreeAlways, 100'000, all_reduce},
    {"halving of three", 3, {0, 1, 2}, kHalvingAlways, 60'000, all_reduce},
    {"halving of two hosts", 4, {0, 0, 1, 1}, kHalvingAlways, 200'000, all_reduce},
    {"two levels", 4, {0, 0, 1, 1}, kNeverSmall, 60'000, all_reduce},
    {"reduce by a tree", 4, {0, 1, 2, 3}, kTreeAlways, 100'000, reduce},
    {"reduce in pairs", 3, {0, 1, 2}, kInPairs, 1000, reduce},
    {"broadcast along a chain", 3, {0, 1, 2}, {.flat_broadcast_bytes = 0}, 30'000, broadcast},
    {"reduce-scatter", 3, {0, 1, 2}, {}, 1002, reduce_scatter},
    {"reduce-scatter in two levels", 4, {0, 0, 1, 1}, {}, 60'000, reduce_scatter},
    {"all to all", 3, {0, 1, 2}, {}, 1002, all_to_all},
    {"messages", 3, {0, 1, 2}, {}, 30'000, messages},
    {"codes", 3, {0, 1, 2}, {}, 30'000, codes},
    {"many small ones", 2, {0, 1}, {}, 1000, crowd},
};

struct Cut {
  int rank, peer;
  uint64_t after, lost;
};

int cuts_wanted() {
  const char* setting = std::getenv("RINGDP_CUTS");
  return setting != nullptr ? std::atoi(setting) : 14;
}

// Pairs that exchange bytes in most algorithms, both ways; at places that differ each time.
std::vector<Cut> cuts_of(const Trial& trial, std::size_t bytes, std::mt19937& random) {
  int count = cuts_wanted();
  std::vector<Cut> out;
  auto add = [&](uint64_t after, int rank, int peer) {
    const uint64_t lost = random() % 3 == 0 ? 0 : random() % 3 == 0 ? 1'000'000 : random() % 2000;
    out.push_back({rank, peer, after, lost});
  };
  if (count == 0 && trial.count == kFew)
    for (uint64_t at = 0; at < bytes; ++at) {
      add(at, 0, 1);
      add(at, 1, 0);
    }
  if (count == 0) count = 200;
  for (int i = 0; i < count; ++i) {
    const int rank = static_cast<int>(random() % static_cast<unsigned>(trial.world));
    const int peer = (rank + 1 + static_cast<int>(random() % static_cast<unsigned>(trial.world - 1))) % trial.world;
    add(i % 2 == 0 ? random() % 300 : random() % bytes, rank, peer);
  }
  return out;
}

// Runs `body` on every rank of a job over TCP whose channels the rank's Cutter can break.
void run_cut_job(const Trial& trial, const std::function<void(Rank&, Cutter&)>& body) {
  MemoryStore store;
  run_ranks(trial.world, [&](int rank) {
    RendezvousOptions rendezvous = rendezvous_options(rank, trial.world);
    rendezvous.links.transport = &tcp_transport();
    rendezvous.host.id = std::to_string(trial.hosts[static_cast<std::size_t>(rank)]);
    auto cutter = std::make_shared<Cutter>();
    EngineOptions options;
    options.segment_bytes = trial.segment_bytes;
    options.wrap_channel = [cutter](std::unique_ptr<Channel> channel, int peer) -> std::unique_ptr<Channel> {
      return std::make_unique<CutChannel>(std::move(channel), cutter, peer);
    };
    auto runtime = std::make_shared<Runtime>(store, rendezvous, options);
    Rank self{rank, trial.world, runtime,
              std::make_unique<GroupHandle>(runtime, "everybody", everybody(trial.world), 20'000, trial.table)};
    body(self, *cutter);
  });
}

void sweep(Trial trial) {
  if (cuts_wanted() == 0 && trial.count <= kShort) trial.count = kFew;
  std::mt19937 random(std::random_device{}());
  std::vector<Cut> cuts;
  std::once_flag planned;
  uint64_t sent = 0;
  std::atomic<int> made{0};
  std::atomic<uint64_t> healed{0};
  std::atomic<std::chrono::steady_clock::duration> slowest{};
  run_cut_job(trial, [&](Rank& self, Cutter& cutter) {
    const std::vector<float> input = input_of(trial.count, self.rank);
    std::vector<float> data = input, out, wanted_out;
    const uint64_t before = self.runtime->engine().traffic().sent;
    trial.run(self, data, wanted_out);
    const std::vector<float> wanted = data;
    const uint64_t bytes = self.runtime->engine().traffic().sent - before;
    self.wait(self.group->barrier({}));
    std::call_once(planned, [&] {
      sent = bytes;
      cuts = cuts_of(trial, std::max<uint64_t>(bytes, 1), random);
    });
    for (const Cut& cut : cuts) {
      data = input;
      std::fill(out.begin(), out.end(), -1.0F);
      self.wait(self.group->barrier({}));
      if (self.rank == cut.rank) cutter.arm(cut.peer, cut.after, cut.lost);
      const auto begin = std::chrono::steady_clock::now();
      trial.run(self, data, out);
      const auto took = std::chrono::steady_clock::now() - begin;
      cutter.disarm();
      CHECK(same_bits(data, wanted));
      CHECK(same_bits(out, wanted_out));
      CHECK(took < kSoon);
      if (self.rank == 0) slowest = std::max(slowest.load(), took);
      std::fill(data.begin(), data.end(), -7.0F);  // what is sent again must not come from here
    }
    self.wait(self.group->barrier({}));
    self.runtime->engine().healing().wait_until_whole(Deadline::after_ms(5000));
    made += cutter.cuts;
    healed += self.runtime->engine().healing().healed();
  });
  if (cuts_wanted() == 0)
    std::printf("     %s: %zu places, %llu bytes on a rank, the slowest took %.0f ms\n", trial.name, cuts.size(),
                static_cast<unsigned long long>(sent),
                std::chrono::duration<double, std::milli>(slowest.load()).count());
  CHECK(made > 0);
  // Both ends of a connection count it. Of more than two ranks one may break before its last break was used, and
  // noticed.
  if (trial.world == 2) CHECK(healed >= static_cast<uint64_t>(made));
  CHECK(healed <= 2 * static_cast<uint64_t>(made));
  CHECK(healed > 0);
}

void sweep_some(std::size_t part, std::size_t of) {
  for (std::size_t i = part; i < kTrials.size(); i += of) {
    sweep(kTrials[i]);
  }
}

}  // namespace

CASE("cut anywhere: the first algorithms") { sweep_some(0, 4); }
CASE("cut anywhere: the second") { sweep_some(1, 4); }
CASE("cut anywhere: the third") { sweep_some(2, 4); }
CASE("cut anywhere: the fourth") { sweep_some(3, 4); }

CASE("all ranks cut at once, again and again") {
  const Trial trial{"", 3, {0, 1, 2}, {}, 20'000, all_reduce};
  std::atomic<int> made{0};
  run_cut_job(trial, [&](Rank& self, Cutter& cutter) {
    const std::vector<float> input = input_of(trial.count, self.rank);
    std::vector<float> data = input, none;
    all_reduce(self, data, none);
    const std::vector<float> wanted = data;
    std::mt19937 random(static_cast<unsigned>(self.rank) + 1);
    for (int i = 0; i < 30; ++i) {
      data = input;
      const int peer = (self.rank + 1 + static_cast<int>(random() % 2)) % 3;
      cutter.arm(peer, random() % 60'000, random() % 100'000);
      all_reduce(self, data, none);
      CHECK(same_bits(data, wanted));
    }
    cutter.disarm();
    self.wait(self.group->barrier({}));
    made += cutter.cuts;
  });
  CHECK(made > 10);
}

// As after an outage: bytes were under way for seconds when the connection ended.
CASE("a connection that is reset after it was held up heals, too") {
  const Trial trial{"", 2, {0, 1}, kNeverSmall, 1000, all_reduce};
  run_cut_job(trial, [&](Rank& self, Cutter& cutter) {
    cutter.held_up_ms = 3000;
    std::vector<float> data(trial.count, 1.0F), none;
    if (self.rank == 0) cutter.arm(1, 100, 100);
    all_reduce(self, data, none);
    CHECK(data == std::vector<float>(trial.count, 2.0F));
    self.wait(self.group->barrier({}));
  });
}

CASE("an operation that fails while its connection heals leaves the group's others whole") {
  const Trial trial{"", 2, {0, 1}, kNeverSmall, 200'000, all_reduce};
  run_cut_job(trial, [&](Rank& self, Cutter& cutter) {
    GroupHandle other(self.runtime, "other", everybody(2), 500, trial.table);
    const std::vector<float> input = input_of(trial.count, self.rank);
    auto data = std::make_unique<std::vector<float>>(input);
    if (self.rank == 0) {
      cutter.arm(1, 100'000, 50'000);
      CHECK_THROWS(ErrorKind::kTimeout,
                   other.wait(*other.all_reduce(bytes_of(*data), DType::kFloat32, ReduceOp::kSum, {})));
      data.reset();  // the other side takes no part: what was sent must come from a copy
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(700));
    }
    std::vector<float> mine(1000, 1.0F), none;
    all_reduce(self, mine, none);
    CHECK(mine == std::vector<float>(1000, 2.0F));
  });
}

CASE("a rank that cannot be dialled again has ended: its peer hears so at once") {
  MemoryStore store;
  run_ranks(2, [&](int rank) {
    RendezvousOptions rendezvous = rendezvous_options(rank, 2);
    rendezvous.links.transport = &tcp_transport();
    rendezvous.links.heals = rank == 1;  // rank 0 does not listen any more
    auto cutter = std::make_shared<Cutter>();
    EngineOptions options;
    options.wrap_channel = [cutter](std::unique_ptr<Channel> channel, int peer) -> std::unique_ptr<Channel> {
      return std::make_unique<CutChannel>(std::move(channel), cutter, peer);
    };
    auto runtime = std::make_shared<Runtime>(store, rendezvous, options);
    GroupHandle group(runtime, "everybody", everybody(2), 20'000, AlgorithmTable{});
    group.wait(*group.barrier({}));
    if (rank == 0) cutter->arm(1, 0, 0);
    std::vector<float> data(1000, 1.0F);
    const auto begin = std::chrono::steady_clock::now();
    const std::string message = CHECK_THROWS(
        ErrorKind::kPeerLost, group.wait(*group.all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {})));
    CHECK(message.find("lost rank " + std::to_string(1 - rank)) != std::string::npos);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(2));
  });
}

CASE("a rank that leaves is not dialled again, and one that heals says goodbye first") {
  const Trial trial{"", 2, {0, 1}, {}, 1000, all_reduce};
  for (int round = 0; round < 5; ++round)
    run_cut_job(trial, [&](Rank& self, Cutter& cutter) {
      std::vector<float> data = input_of(trial.count, self.rank), none;
      if (self.rank == 0) cutter.arm(1, 100 + 40 * static_cast<uint64_t>(round), 1000);
      all_reduce(self, data, none);
      self.group.reset();
      self.runtime->shut_down();
      CHECK(!self.runtime->engine().healing().hold(1 - self.rank));
    });
}
