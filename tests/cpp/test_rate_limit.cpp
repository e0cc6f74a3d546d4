// The rate limit: its books in made-up time, and jobs whose ranks keep it, sleep meanwhile and still notice each
// other.
#include <ctime>

#include "job.h"
#include "transport/rate_limit.h"
#include "transport/tcp.h"

namespace ringdp::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int64_t kRate = 12'500'000;  // 100 Mbit/s

double to_seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

// What a sender that always has something gets through in `time`, asking every `step`.
std::size_t greedy(RateLimiter& limiter, Clock::time_point start, Clock::duration time, Clock::duration step) {
  std::size_t sent = 0;
  for (auto now = start; now < start + time; now += step)
    while (std::size_t allowed = limiter.allowance(now)) {
      limiter.spend(allowed, now);
      sent += allowed;
    }
  return sent;
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

double cpu_seconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Over TCP, on hosts of their own as far as the rate is concerned.
void run_limited(int world, int64_t rate, const std::function<void(Rank&)>& body, bool one_host = false) {
  EngineOptions options;
  options.rate_bytes_per_s = rate;
  MemoryStore store;
  run_ranks(world, [&](int rank) {
    RendezvousOptions rendezvous = rendezvous_options(rank, world);
    rendezvous.links.transport = &tcp_transport();
    if (!one_host) rendezvous.host.id = "host " + std::to_string(rank);
    auto runtime = std::make_shared<Runtime>(store, rendezvous, options);
    Rank self{rank, world, runtime,
              std::make_unique<GroupHandle>(runtime, "everybody", everybody(world), 30'000, AlgorithmTable{})};
    body(self);
  });
}

}  // namespace

CASE("a line carries its rate, whoever asks how often, and little is gained by resting") {
  const Clock::time_point start{std::chrono::hours(1)};
  for (int64_t rate : {int64_t{8'000}, kRate, int64_t{1'250'000'000}})
    for (Clock::duration step : {Clock::duration(microseconds(30)), Clock::duration(milliseconds(7))}) {
      RateLimiter limiter(rate);
      greedy(limiter, start, milliseconds(100), step);
      auto resting = start + std::chrono::seconds(100);
      auto sent = static_cast<double>(greedy(limiter, resting, std::chrono::seconds(2), step));
      double carried = 2 * static_cast<double>(rate);
      double slack = static_cast<double>(rate) * to_seconds(RateLimiter::kLateness + RateLimiter::kQuantum) +
                     static_cast<double>(RateLimiter::kLeastQuantumBytes);
      CHECK(sent <= carried + slack);
      CHECK(sent >= carried - static_cast<double>(rate) * to_seconds(step) - slack);
    }
}

CASE("who comes much too late has lost what the line did not carry") {
  const Clock::time_point start{std::chrono::hours(1)};
  RateLimiter limiter(kRate);
  auto sent = static_cast<double>(greedy(limiter, start, std::chrono::seconds(4), std::chrono::seconds(1)));
  CHECK(sent <= 4 * static_cast<double>(kRate) * to_seconds(RateLimiter::kLateness + RateLimiter::kQuantum));
}

CASE("an all-reduce takes as long as the rate says, the ranks sleep meanwhile, the sum is right") {
  constexpr std::size_t kCount = 1'000'000;  // each of two ranks sends them once: 4 MB, 0.32 s
  for (bool one_host : {false, true})
    run_limited(
        2, one_host ? 2 * kRate : kRate,  // ranks of one host share it
        [&](Rank& self) {
          std::vector<float> data(kCount, static_cast<float>(self.rank + 1));
          self.wait(self.group->barrier({}));
          auto start = Clock::now();
          double cpu = cpu_seconds();
          uint64_t before = self.runtime->engine().traffic().sent;
          self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
          double took = to_seconds(Clock::now() - start);
          uint64_t sent = self.runtime->engine().traffic().sent - before;
          CHECK(data == std::vector<float>(kCount, 3.0F));
          CHECK(sent >= kCount * 4);
          CHECK(took >= 0.95 * static_cast<double>(sent) / kRate);
          if (!kSanitized) CHECK(cpu_seconds() - cpu < took);  // of two ranks; polling would be twice that
          self.wait(self.group->barrier({}));
        },
        one_host);
}

CASE("every peer gets its turn: many small messages pass while large ones go elsewhere") {
  run_limited(4, kRate, [](Rank& self) {
    std::vector<float> large(200'000), small(16);
    std::vector<std::shared_ptr<Work>> works;
    if (self.rank == 0) {
      works.push_back(self.group->send(bytes_of(large), DType::kFloat32, 1, 0, {}));
      works.push_back(self.group->send(bytes_of(large), DType::kFloat32, 2, 0, {}));
      auto last = self.group->send(bytes_of(small), DType::kFloat32, 3, 0, {});
      self.wait(last);
      CHECK(!works[0]->finished());
      CHECK(!works[1]->finished());
    } else if (self.rank < 3) {
      works.push_back(self.group->receive(bytes_of(large), DType::kFloat32, 0, 0, {}));
    } else {
      works.push_back(self.group->receive(bytes_of(small), DType::kFloat32, 0, 0, {}));
    }
    for (const auto& work : works) self.wait(work);
  });
}

CASE("a rank that leaves in the middle is known long before its bytes would have come") {
  run_limited(3, 100'000, [](Rank& self) {  // 4 MB would take 40 s
    std::vector<float> data(1'000'000);
    auto work = self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {});
    auto start = Clock::now();
    if (self.rank == 1) return self.group.reset();  // before its buffer
    try {
      self.wait(work);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find("rank 1") != std::string::npos);
    }
    CHECK(to_seconds(Clock::now() - start) < 10);
  });
}

}  // namespace ringdp::testing
