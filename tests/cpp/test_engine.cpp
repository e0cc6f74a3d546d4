// The engine with ranks as threads: every collective and algorithm, concurrency, order, callbacks, and what fails.
#include <array>
#include <bit>
#include <deque>
#include <future>
#include <mutex>
#include <random>

#include "engine/completion.h"
#include "job.h"

namespace ringdp::testing {
namespace {

const std::vector<AlgorithmTable> kTables{kFoldAlways, kNeverSmall, kTreeAlways, kHalvingAlways, AlgorithmTable{}};

// Whole numbers: every order of adding gives the same, in float32, bfloat16 and bytes, of eight ranks. The order of
// each algorithm, to the bit, and the other types: tests/contract/test_collectives_core.py.
constexpr std::size_t kPeriod = 23;
unsigned value(int rank, std::size_t tensor, std::size_t i) {
  return static_cast<unsigned>((i * 31 + tensor * 7 + static_cast<std::size_t>(rank) * 101) % kPeriod);
}

void put(DType dtype, std::byte* at, std::size_t i, float number) {
  if (dtype == DType::kUint8) {
    at[i] = std::byte{static_cast<uint8_t>(number)};
  } else if (dtype == DType::kFloat32) {
    std::memcpy(at + 4 * i, &number, 4);
  } else {
    const auto half = static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16);
    std::memcpy(at + 2 * i, &half, 2);
  }
}

// In which `of(i)`, which has the period of `value`, stands.
template <class Of>
std::vector<std::byte> filled(DType dtype, std::size_t count, Of&& of) {
  std::vector<std::byte> out(count * dtype_size(dtype));
  for (std::size_t i = 0; i < std::min(count, kPeriod); ++i) put(dtype, out.data(), i, static_cast<float>(of(i)));
  for (std::size_t done = kPeriod * dtype_size(dtype); done < out.size(); done *= 2)
    std::memcpy(out.data() + done, out.data(), std::min(done, out.size() - done));
  return out;
}

enum class Kind { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kBarrier };

struct Call {
  Kind kind;
  DType dtype;
  ReduceOp op;
  int root;
  bool caller_waits;
  std::vector<std::size_t> counts;  // of its tensors: one, or several for kAllGather and kReduceScatter
};

Call any_call(std::mt19937_64& random, int world) {
  const auto of = [&](auto... choices) { return std::array{choices...}[random() % sizeof...(choices)]; };
  Call call{
      of(Kind::kAllReduce, Kind::kAllReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kReduceScatter, Kind::kBarrier),
      of(DType::kFloat32, DType::kFloat32, DType::kBfloat16, DType::kUint8),
      of(ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kAvg),
      static_cast<int>(random() % static_cast<unsigned>(world)),
      random() % 2 == 0,
      {}};
  if (call.op == ReduceOp::kAvg && call.dtype != DType::kFloat32) call.op = ReduceOp::kSum;
  const bool several = call.kind == Kind::kAllGather || call.kind == Kind::kReduceScatter;
  for (std::size_t left = several ? 1 + random() % 5 : 1; left > 0; --left)
    call.counts.push_back(
        of(0UL, 1UL, 3UL, 17UL, 64UL, 1009UL, 16'385UL, 65'535UL, 65'536UL, several ? 7UL : 140'001UL));
  return call;
}

// Of the values of `world` ranks from `first` on.
float reduced(const Call& call, int first, int world, std::size_t tensor, std::size_t i) {
  unsigned sum = 0, most = 0;
  for (int rank = first; rank < first + world; ++rank)
    sum += value(rank, tensor, i), most = std::max(most, value(rank, tensor, i));
  if (call.op == ReduceOp::kMax) return static_cast<float>(most);
  return static_cast<float>(sum) / static_cast<float>(call.op == ReduceOp::kAvg ? world : 1);
}

// What a rank's call reads and writes, and what must stand there afterwards.
struct Issued {
  std::deque<std::pair<std::vector<std::byte>, std::vector<std::byte>>> memory;
  std::shared_ptr<Work> work;

  Issued(Rank& self, const Call& call) {
    const auto add = [&](std::vector<std::byte> before, std::vector<std::byte> after) {
      return std::span(memory.emplace_back(std::move(before), std::move(after)).first);
    };
    const auto mine = [&](int rank, std::size_t t) {
      return filled(call.dtype, call.counts[t], [&](std::size_t i) { return value(rank, t, i); });
    };
    const auto sum = [&](int first, std::size_t t) {
      return filled(call.dtype, call.counts[t], [&](std::size_t i) { return reduced(call, first, self.world, t, i); });
    };
    const auto empty = [&](std::size_t t) { return std::vector<std::byte>(call.counts[t] * dtype_size(call.dtype)); };
    CallOptions options;
    options.caller_waits = call.caller_waits;
    std::vector<GatheredTensor> gathered(call.counts.size());
    std::vector<ScatteredTensor> scattered(call.counts.size());
    for (std::size_t t = 0; t < call.counts.size(); ++t) {
      if (call.kind == Kind::kAllGather) gathered[t].input = add(mine(self.rank, t), mine(self.rank, t));
      if (call.kind == Kind::kReduceScatter) scattered[t].output = add(empty(t), sum(self.rank, t));
      for (int rank = 0; rank < self.world; ++rank) {
        if (call.kind == Kind::kAllGather) gathered[t].blocks.push_back(add(empty(t), mine(rank, t)));
        if (call.kind == Kind::kReduceScatter)  // inputs stay as they are
          scattered[t].chunks.push_back(add(mine(self.rank + rank, t), mine(self.rank + rank, t)));
      }
    }
    switch (call.kind) {
      case Kind::kAllReduce:
        work = self.group->all_reduce(add(mine(self.rank, 0), sum(0, 0)), call.dtype, call.op, options);
        break;
      case Kind::kBroadcast:
        work = self.group->broadcast(add(mine(self.rank, 0), mine(call.root, 0)), call.dtype, call.root, options);
        break;
      case Kind::kAllGather:
        work = self.group->all_gather(gathered, call.dtype, options);
        break;
      case Kind::kReduceScatter:
        work = self.group->reduce_scatter(scattered, call.dtype, call.op, options);
        break;
      case Kind::kBarrier:
        work = self.group->barrier(options);
    }
  }
};

}  // namespace

CASE("any collectives that are in flight together give what they are to, by every algorithm") {
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    std::mt19937_64 random(seed);
    const int world = std::array{1, 2, 3, 4, 5, 8}[seed % 6];
    std::vector<Call> calls;
    for (std::size_t left = 3 + random() % 6; left > 0; --left) calls.push_back(any_call(random, world));
    run_job(world, kTables[seed / 6 % kTables.size()], [&](Rank& self) {
      std::deque<Issued> issued;
      for (const Call& call : calls) issued.emplace_back(self, call);
      for (const Issued& it : issued) self.wait(it.work);
      for (std::size_t at = 0; at < calls.size(); ++at)
        for (const auto& [got, wanted] : issued[at].memory)
          if (got != wanted)
            report_failure(__FILE__, __LINE__,
                           "seed " + std::to_string(seed) + ", call " + std::to_string(at) + " of kind " +
                               shown(calls[at].kind) + ", " + std::string(dtype_name(calls[at].dtype)));
    });
  }
}

CASE("a thousand operations in flight end in order, on every rank with the same sums") {
  run_job(3, AlgorithmTable{}, [&](Rank& self) {
    constexpr int kCount = 1000;
    std::vector<std::vector<int64_t>> data;
    std::vector<std::shared_ptr<Work>> works;
    std::mutex mutex;
    std::vector<int> order;
    for (int i = 0; i < kCount; ++i) data.emplace_back(1 + static_cast<std::size_t>(i * 7919 % 3001), self.rank + i);
    for (int i = 0; i < kCount; ++i) {
      CallOptions options;
      options.on_done = [&, i](std::exception_ptr error) {
        CHECK(error == nullptr);
        std::lock_guard lock(mutex);
        order.push_back(i);
      };
      works.push_back(
          self.group->all_reduce(bytes_of(data[static_cast<std::size_t>(i)]), DType::kInt64, ReduceOp::kSum, options));
    }
    for (auto& work : works) self.wait(work);
    for (int i = 0; i < kCount; ++i)
      for (int64_t got : data[static_cast<std::size_t>(i)]) REQUIRE(got == 3 + 3 * i);
    while (true) {
      std::lock_guard lock(mutex);
      if (order.size() == kCount) break;
    }
    CHECK(std::is_sorted(order.begin(), order.end()));
  });
}

CASE("a collective inside a callback is matched although the ranks are elsewhere") {
  run_job(2, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> first(1000, 1.0F), inner(500, 2.0F);
    std::vector<std::vector<float>> later(20, std::vector<float>(3000, 1.0F));
    std::atomic<bool> inner_done{false};
    CallOptions options;
    options.on_done = [&](std::exception_ptr) {
      self.wait(self.group->all_reduce(bytes_of(inner), DType::kFloat32, ReduceOp::kSum, {}));
      inner_done = true;
    };
    auto work = self.group->all_reduce(bytes_of(first), DType::kFloat32, ReduceOp::kSum, options);
    if (self.rank == 1) {
      self.wait(work);
      while (!inner_done) std::this_thread::yield();  // rank 0 has issued all that follows by now
    }
    std::vector<std::shared_ptr<Work>> works;
    for (auto& data : later)
      works.push_back(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
    for (auto& it : works) self.wait(it);
    while (!inner_done) std::this_thread::yield();
    CHECK_EQ(inner[499], 4.0F);
    CHECK_EQ(later[19][2999], 2.0F);
  });
}

CASE("a callback may wait for what follows the operations that it issued, and those of callbacks in it") {
  run_job(2, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> first(1000, 1.0F), inner(500, 2.0F), innermost(70000, 3.0F);
    std::promise<void> inner_followed, innermost_followed, first_followed;
    CallOptions options, inner_options, innermost_options;
    innermost_options.on_done = [&](std::exception_ptr) { innermost_followed.set_value(); };
    inner_options.on_done = [&](std::exception_ptr) {
      self.group->all_reduce(bytes_of(innermost), DType::kFloat32, ReduceOp::kSum, innermost_options);
      innermost_followed.get_future().wait();
      inner_followed.set_value();
    };
    options.on_done = [&](std::exception_ptr) {
      self.group->all_reduce(bytes_of(inner), DType::kFloat32, ReduceOp::kSum, inner_options);
      inner_followed.get_future().wait();
      first_followed.set_value();
    };
    self.wait(self.group->all_reduce(bytes_of(first), DType::kFloat32, ReduceOp::kSum, options));
    first_followed.get_future().wait();
    CHECK_EQ(first[999], 2.0F);
    CHECK_EQ(inner[499], 4.0F);
    CHECK_EQ(innermost[69999], 6.0F);
  });
}

CASE("what one callback issues ends in order, and keeps its order on the same memory") {
  run_job(3, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> first(10, 1.0F), large(400'000, 1.0F), small(3, 1.0F), other(3, 1.0F);
    std::promise<void> issued, ended;
    std::vector<int> order;  // of the lane's thread
    std::vector<std::shared_ptr<Work>> works;
    CallOptions options;
    auto issue = [&](std::vector<float>& data) {
      CallOptions each;
      each.on_done = [&, number = works.size()](std::exception_ptr) {
        order.push_back(static_cast<int>(number));
        if (order.size() == 5) ended.set_value();
      };
      works.push_back(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, each));
    };
    options.on_done = [&](std::exception_ptr) {
      for (auto* data : {&large, &small, &large, &large, &other}) issue(*data);
      issued.set_value();
    };
    self.wait(self.group->all_reduce(bytes_of(first), DType::kFloat32, ReduceOp::kSum, options));
    issued.get_future().wait();
    self.wait(works.back());
    for (auto& work : works) CHECK(work->finished());
    ended.get_future().wait();
    CHECK(order == (std::vector<int>{0, 1, 2, 3, 4}));
    for (std::size_t i : {std::size_t{0}, std::size_t{200'000}, std::size_t{399'999}}) CHECK_EQ(large[i], 27.0F);
    CHECK_EQ(small[2], 3.0F);
    CHECK_EQ(other[2], 3.0F);
  });
}

CASE("what follows an operation begins when the gate in which it was issued opens, on the completion thread") {
  run_job(2, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> data(10, 1.0F);
    std::promise<bool> followed;
    auto future = followed.get_future();
    std::atomic<bool> held{true};
    {
      const CallbackGate gate;
      CallOptions options;
      options.on_done = [&](std::exception_ptr) { followed.set_value(!held); };
      auto work = self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, options);
      self.wait(work);
      CHECK(future.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout);
      held = false;
    }
    CHECK(future.get());
    CHECK(CallbackGate::current() == nullptr);
  });
}

CASE("ranks that believe in different roots hear of it, whether both send or both wait") {
  for (int world : {2, 3}) {
    for (std::size_t count : {std::size_t{0}, std::size_t{100000}}) {
      for (int odd_root : {0, 1}) {
        run_job(world, AlgorithmTable{}, [&](Rank& self) {
          std::vector<float> data(count), more(10);
          int root = self.rank == 1 ? odd_root : 1 - odd_root;
          std::string message = CHECK_THROWS(ErrorKind::kMismatch, [&] {
            self.wait(self.group->broadcast(bytes_of(data), DType::kFloat32, root, {}));
            self.wait(self.group->all_reduce(bytes_of(more), DType::kFloat32, ReduceOp::kSum, {}));
          }());
          CHECK(message.find("root 0") != std::string::npos);
          CHECK(message.find("root 1") != std::string::npos);
        });
      }
    }
  }
}

CASE("a broadcast to a rank that starts late leaves nothing behind, even when the root has gone") {
  run_job(3, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> data(5000, static_cast<float>(self.rank));
    self.wait(self.group->barrier({}));
    if (self.rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (int i = 0; i < 100; ++i) self.wait(self.group->broadcast(bytes_of(data), DType::kFloat32, 0, {}));
    CHECK_EQ(data[4999], 0.0F);
  });
}

CASE("groups used from several threads in different orders do not disturb each other") {
  run_job(4, AlgorithmTable{}, [&](Rank& self) {
    std::vector<std::unique_ptr<GroupHandle>> groups;
    for (int g = 0; g < 6; ++g)
      groups.push_back(
          std::make_unique<GroupHandle>(self.runtime, "g" + std::to_string(g), everybody(4), 30'000, AlgorithmTable{}));
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (int round = 0; round < 20; ++round) {
          // Each thread owns two groups; ranks issue to them in different orders and wait for both.
          std::vector<std::vector<int32_t>> data{std::vector<int32_t>(100, self.rank),
                                                 std::vector<int32_t>(40000, self.rank)};
          std::vector<std::shared_ptr<Work>> works(2);
          for (std::size_t k = 0; k < 2; ++k) {
            std::size_t g = (k + static_cast<std::size_t>(self.rank)) % 2;
            works[g] = groups[2 * static_cast<std::size_t>(t) + g]->all_reduce(bytes_of(data[g]), DType::kInt32,
                                                                               ReduceOp::kSum, {});
          }
          for (auto& work : works) self.wait(work);
          CHECK_EQ(data[0].back(), 6);
          CHECK_EQ(data[1].back(), 6);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

CASE("ranks that disagree all fail, and each names both sides") {
  for (int world : {2, 4}) {
    run_job(world, AlgorithmTable{}, [&](Rank& self) {
      std::vector<float> floats(100, 1.0F);
      std::vector<int32_t> ints(100, 1);
      std::string message = CHECK_THROWS(
          ErrorKind::kMismatch,
          self.wait(self.rank == 1 ? self.group->all_reduce(bytes_of(ints), DType::kInt32, ReduceOp::kSum, {})
                                   : self.group->all_reduce(bytes_of(floats), DType::kFloat32, ReduceOp::kSum, {})));
      CHECK(message.find("int32[100]") != std::string::npos);
      CHECK(message.find("float32[100]") != std::string::npos);
      CHECK(message.find("rank 1") != std::string::npos);
      CHECK_THROWS(ErrorKind::kMismatch, self.group->barrier({}));
    });
  }
}

CASE("a rank that leaves is named by those that wait for it") {
  std::atomic<int> through{0};
  run_job(3, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> data(100000, 1.0F);
    self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
    ++through;
    while (through < 3) std::this_thread::yield();
    if (self.rank == 2) return;
    std::string message = CHECK_THROWS(
        ErrorKind::kPeerLost, self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {})));
    CHECK(message.find("rank 2") != std::string::npos);
    CHECK(message.find("all_reduce #2") != std::string::npos);
  });
}

CASE("a timeout names the rank that is missing") {
  run_job(
      3, AlgorithmTable{},
      [&](Rank& self) {
        std::vector<float> data(10, 1.0F);
        self.wait(self.group->barrier({}));
        if (self.rank == 1) {
          // Present but silent until the others have failed; then it gets the reason.
          std::this_thread::sleep_for(std::chrono::milliseconds(600));
          // The others' bytes are here already, so this one may still end well; the next cannot.
          CHECK_THROWS(ErrorKind::kTimeout, [&] {
            for (;;) self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
          }());
          return;
        }
        std::string message =
            CHECK_THROWS(ErrorKind::kTimeout,
                         self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {})));
        CHECK(message.find("rank 1") != std::string::npos);
        CHECK(message.find(" Timed out ") != std::string::npos);
      },
      200);
}

CASE("a timeout is seen by a driver that never rests") {
  EngineOptions restless;
  restless.spin_us = 20'000'000;
  std::atomic<bool> gave_up{false};
  auto body = [&](Rank& self) {
    std::vector<float> data(10);
    auto begin = Clock::now();
    if (self.rank == 1) {
      while (!gave_up && Clock::now() - begin < std::chrono::seconds(10)) std::this_thread::yield();
      return;
    }
    CallOptions options;
    options.caller_waits = true;  // so that no other thread drives
    CHECK_THROWS(ErrorKind::kTimeout,
                 self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, options)));
    CHECK(Clock::now() - begin < std::chrono::seconds(3));
    gave_up = true;
  };
  run_job(2, AlgorithmTable{}, body, 200, restless);
}

CASE("a group may be destroyed and made again under the same name") {
  run_job(2, AlgorithmTable{}, [&](Rank& self) {
    for (int round = 0; round < 50; ++round) {
      GroupHandle again(self.runtime, "again", everybody(2), 30'000, AlgorithmTable{});
      std::vector<int32_t> data(100, self.rank + round);
      again.wait(*again.all_reduce(bytes_of(data), DType::kInt32, ReduceOp::kSum, {}));
      CHECK_EQ(data[99], 2 * round + 1);
    }
  });
}

CASE("a window with less left than one element stops nobody") {
  run_job(2, AlgorithmTable{}, [&](Rank& self) {
    GroupHandle first(self.runtime, "first", everybody(2), 5000, AlgorithmTable{});
    GroupHandle second(self.runtime, "second", everybody(2), 5000, AlgorithmTable{});
    std::vector<std::vector<float>> data;
    for (int i = 0; i < 16; ++i) data.emplace_back(i == 15 ? 16384 - 8 : 16384, 1.0F);  // the window less 32 bytes
    std::vector<float> small(1024, 1.0F);
    std::vector<std::shared_ptr<Work>> works;
    auto fill = [&] {
      for (std::size_t i = 0; i < 16; ++i)
        works.push_back((i < 8 ? first : second).all_reduce(bytes_of(data[i]), DType::kFloat32, ReduceOp::kSum, {}));
    };
    if (self.rank == 0) fill();
    self.wait(self.group->all_reduce(bytes_of(small), DType::kFloat32, ReduceOp::kSum, {}));
    if (self.rank == 1) fill();
    for (auto& work : works) self.wait(work);
    CHECK_EQ(small[0], 2.0F);
    CHECK_EQ(data[15][0], 2.0F);
    self.wait(self.group->barrier({}));
  });
}

CASE("a group destroyed while something is in flight tells the others") {
  std::atomic<bool> closed{false}, heard{false};
  run_job(2, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> data(1 << 22, 1.0F);
    GroupHandle group(self.runtime, "g", everybody(2), 20'000, AlgorithmTable{});
    auto all_reduce = [&] { return group.all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}); };
    if (self.rank == 0) {
      auto work = all_reduce();
      group.close();
      closed = true;
      while (!heard) std::this_thread::yield();
      return;
    }
    while (!closed) std::this_thread::yield();
    std::string message = CHECK_THROWS(ErrorKind::kState, group.wait(*all_reduce()));
    CHECK(message.find("destroyed on rank 0") != std::string::npos);
    heard = true;
  });
}

CASE("memory kept for a peer that runs ahead is bounded") {
  run_job(2, AlgorithmTable{}, [&](Rank& self) {
    // Rank 0 issues 64 MiB of small operations before rank 1 issues any; all of them must still come out right.
    constexpr int kCount = 2048;
    std::vector<std::vector<float>> data(kCount, std::vector<float>(8192, static_cast<float>(self.rank + 1)));
    std::vector<std::shared_ptr<Work>> works;
    if (self.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    for (auto& it : data) works.push_back(self.group->all_reduce(bytes_of(it), DType::kFloat32, ReduceOp::kSum, {}));
    for (auto& work : works) self.wait(work);
    std::size_t wrong = 0;
    for (auto& it : data) wrong += it[8191] != 3.0F;
    CHECK_EQ(wrong, std::size_t{0});
  });
}

}  // namespace ringdp::testing
