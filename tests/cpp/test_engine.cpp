// The engine with ranks as threads: every collective and algorithm, concurrency, order, callbacks, and what fails.
#include <cmath>
#include <deque>
#include <future>
#include <mutex>
#include <random>

#include "engine/callback_gate.h"
#include "job.h"
#include "kernels/kernels.h"

namespace ringdp::testing {
namespace {

const AlgorithmTable kFoldAlways{1ULL << 40, 1ULL << 40, 1ULL << 40, 1ULL << 40};
const AlgorithmTable kNeverSmall{0, 0, 0, 0};

float value(int rank, std::size_t i) {
  return static_cast<float>((i * 2654435761ULL + static_cast<std::size_t>(rank) * 40503ULL) % 20011) / 127.0F - 50.0F;
}

// x_first + x_{first+1} + … (ranks modulo n): the ring's order for the chunk that starts at rank `first`.
float sum_from(int first, int world, std::size_t i) {
  float sum = value(first, i);
  for (int step = 1; step < world; ++step) sum = sum + value((first + step) % world, i);
  return sum;
}

// The rank with which the sum of element i begins: equal blocks of slabs, see docs/reference/algorithms.md; all ranks
// are on one host.
int first_rank(std::size_t i, std::size_t count, int world) {
  std::size_t n = static_cast<std::size_t>(world), slab = n * (n == 2 || n > 4 ? 65536 : 16384),
              begin = i / slab * slab;
  std::size_t each = (std::min(slab, count - begin) + n - 1) / n;
  each = (each + 15) / 16 * 16;
  return static_cast<int>((i - begin) / each);
}

void check_all_reduce(const AlgorithmTable& table, int world, std::size_t count, ReduceOp op, bool synchronous) {
  run_job(world, table, [&](Rank& self) {
    std::vector<float> data(count);
    for (std::size_t i = 0; i < count; ++i) data[i] = value(self.rank, i);
    CallOptions options;
    options.caller_waits = synchronous;
    self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, op, options));
    bool ring =
        choose_all_reduce(table, std::vector<int>(world), DType::kFloat32, count * 4) == Algorithm::kRing && world > 1;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      float wanted = sum_from(ring ? first_rank(i, count, world) : 0, world, i);
      if (op == ReduceOp::kAvg) wanted = wanted / static_cast<float>(world);
      if (op == ReduceOp::kMax) {
        wanted = value(0, i);
        for (int r = 1; r < world; ++r) wanted = std::max(wanted, value(r, i));
      }
      wrong += std::memcmp(&wanted, &data[i], sizeof(float)) != 0;
    }
    CHECK_EQ(wrong, std::size_t{0});
  });
}

const std::vector<std::size_t> kSizes{0, 1, 2, 3, 5, 1009, 65535, 65536, 65537, 300007};

}  // namespace

CASE("all-reduce by ring sums in the ring's order, to the bit, for every world and size") {
  for (int world : {1, 2, 3, 4, 5, 8})
    for (std::size_t count : kSizes) check_all_reduce(kNeverSmall, world, count, ReduceOp::kSum, world % 2 == 0);
}

CASE("all-reduce by fold sums in rank order, to the bit, for every world and size") {
  for (int world : {1, 2, 3, 4, 5, 8})
    for (std::size_t count : kSizes) check_all_reduce(kFoldAlways, world, count, ReduceOp::kSum, world % 2 == 1);
}

CASE("average and maximum") {
  for (const AlgorithmTable& table : {kFoldAlways, kNeverSmall})
    for (ReduceOp op : {ReduceOp::kAvg, ReduceOp::kMax}) check_all_reduce(table, 3, 70001, op, true);
}

CASE("half types are added in float32 in rank order and rounded once, whatever the algorithm") {
  for (int world : {2, 3, 5}) {
    for (const AlgorithmTable& table : {kFoldAlways, kNeverSmall, AlgorithmTable{}}) {
      for (std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{300007}}) {
        run_job(world, table, [&](Rank& self) {
          const ReduceKernels& kernels = reduce_kernels(DType::kBfloat16, ReduceOp::kAvg);
          auto fill = [&](int rank) {
            std::vector<float> wide(count);
            for (std::size_t i = 0; i < count; ++i) wide[i] = value(rank, i);
            std::vector<uint16_t> out(count);
            kernels.store(out.data(), wide.data(), 1.0F, count);
            return out;
          };
          std::vector<uint16_t> data = fill(self.rank), wanted(count);
          std::vector<float> sum(count);
          for (int rank = 0; rank < world; ++rank) {
            std::vector<uint16_t> theirs = fill(rank);
            if (rank == 0)
              kernels.load(sum.data(), theirs.data(), count);
            else
              kernels.accumulate(sum.data(), theirs.data(), count);
          }
          kernels.store(wanted.data(), sum.data(), static_cast<float>(world), count);
          self.wait(self.group->all_reduce(bytes_of(data), DType::kBfloat16, ReduceOp::kAvg, {}));
          CHECK(data == wanted);
        });
      }
    }
  }
}

CASE("broadcast, all-gather, reduce-scatter and barrier") {
  for (int world : {1, 2, 3, 4, 5, 8}) {
    for (const AlgorithmTable& table : {kFoldAlways, kNeverSmall}) {
      for (std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{17}, std::size_t{100'003}}) {
        run_job(world, table, [&](Rank& self) {
          for (int root = 0; root < world; root += 2) {
            std::vector<float> data(count);
            for (std::size_t i = 0; i < count; ++i) data[i] = self.rank == root ? value(root, i) : -1.0F;
            self.wait(self.group->broadcast(bytes_of(data), DType::kFloat32, root, {}));
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < count; ++i) wrong += data[i] != value(root, i);
            CHECK_EQ(wrong, std::size_t{0});
          }
          std::vector<float> mine(count);
          for (std::size_t i = 0; i < count; ++i) mine[i] = value(self.rank, i);
          std::vector<std::vector<float>> all(static_cast<std::size_t>(world), std::vector<float>(count));
          std::vector<std::span<std::byte>> blocks;
          for (auto& block : all) blocks.push_back(bytes_of(block));
          self.wait(self.group->all_gather(bytes_of(mine), blocks, DType::kFloat32, {}));
          std::size_t wrong = 0;
          for (int rank = 0; rank < world; ++rank)
            for (std::size_t i = 0; i < count; ++i) wrong += all[static_cast<std::size_t>(rank)][i] != value(rank, i);
          CHECK_EQ(wrong, std::size_t{0});

          std::vector<std::vector<float>> inputs;
          std::vector<std::span<std::byte>> chunks;
          for (int rank = 0; rank < world; ++rank) {
            auto& chunk = inputs.emplace_back(count);
            for (std::size_t i = 0; i < count; ++i) chunk[i] = value(self.rank, i + static_cast<std::size_t>(rank));
          }
          for (auto& chunk : inputs) chunks.push_back(bytes_of(chunk));
          auto before = inputs;
          std::vector<float> out(count);
          self.wait(self.group->reduce_scatter(chunks, bytes_of(out), DType::kFloat32, ReduceOp::kSum, {}));
          wrong = 0;
          for (std::size_t i = 0; i < count; ++i)
            wrong += out[i] != sum_from(0, world, i + static_cast<std::size_t>(self.rank));
          CHECK_EQ(wrong, std::size_t{0});
          CHECK(inputs == before);
          self.wait(self.group->barrier({}));
        });
      }
    }
  }
}

CASE("tensors in one operation get what each gets alone, whatever their sizes") {
  const std::vector<std::size_t> sizes{70'001, 0,  1,      131'070,
                                       3,      64, 200'003};  // bytes: blocks end within elements' granules
  for (int world : {1, 2, 3, 5}) {
    for (const AlgorithmTable& table : {kFoldAlways, kNeverSmall}) {
      run_job(world, table, [&](Rank& self) {
        const auto ranks = static_cast<std::size_t>(world);
        auto byte = [](std::size_t rank, std::size_t tensor, std::size_t i) {
          return static_cast<uint8_t>((i * 31 + tensor * 7 + rank * 101) % 251);
        };
        std::deque<std::vector<uint8_t>> kept;  // what the operations use
        auto memory = [&](std::size_t bytes) { return bytes_of(kept.emplace_back(bytes)); };
        std::vector<GatheredTensor> gathered;
        std::vector<ScatteredTensor> scattered;
        for (std::size_t t = 0; t < sizes.size(); ++t) {
          GatheredTensor& to_all = gathered.emplace_back();
          ScatteredTensor& to_owner = scattered.emplace_back();
          to_all.input = memory(sizes[t]);
          for (std::size_t i = 0; i < sizes[t]; ++i) kept.back()[i] = byte(static_cast<std::size_t>(self.rank), t, i);
          for (std::size_t r = 0; r < ranks; ++r) {
            to_owner.chunks.push_back(memory(sizes[t]));
            for (std::size_t i = 0; i < sizes[t]; ++i)
              kept.back()[i] = byte(static_cast<std::size_t>(self.rank) + r, t, i);
            to_all.blocks.push_back(memory(sizes[t]));
          }
          to_owner.output = memory(sizes[t]);
        }
        const auto works = {self.group->all_gather(gathered, DType::kUint8, {}),
                            self.group->reduce_scatter(scattered, DType::kUint8, ReduceOp::kMax, {})};
        for (const auto& work : works) self.wait(work);
        std::size_t wrong = 0;
        for (std::size_t t = 0; t < sizes.size(); ++t) {
          for (std::size_t i = 0; i < sizes[t]; ++i) {
            uint8_t most = 0;
            for (std::size_t r = 0; r < ranks; ++r) {
              wrong += gathered[t].blocks[r][i] != std::byte{byte(r, t, i)};
              most = std::max(most, byte(r + static_cast<std::size_t>(self.rank), t, i));
            }
            wrong += scattered[t].output[i] != std::byte{most};
          }
        }
        CHECK_EQ(wrong, std::size_t{0});
      });
    }
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

CASE("operations on the same memory keep their order without a wait in between") {
  run_job(2, AlgorithmTable{}, [&](Rank& self) {
    std::vector<float> data(100000, 1.0F);
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 5; ++i)
      works.push_back(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
    std::vector<float> other(data.size()), mine(data.size());
    works.push_back(self.group->all_gather(bytes_of(data), {bytes_of(mine), bytes_of(other)}, DType::kFloat32, {}));
    for (auto& work : works) self.wait(work);
    CHECK_EQ(data[99999], 32.0F);
    CHECK_EQ(other[7], 32.0F);
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
  for (int world : {2, 3, 5}) {
    for (std::size_t count : {std::size_t{0}, std::size_t{4}, std::size_t{100000}}) {
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
