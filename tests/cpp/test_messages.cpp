// Messages between ranks that are threads, beside collectives, and the collectives with a root; on good and bad
// networks.
#include <atomic>
#include <random>
#include <thread>

#include "collective/direct.h"
#include "faulty.h"
#include "job.h"

namespace ringdp::testing {
namespace {

std::vector<int32_t> message(int from, int tag, int index, std::size_t count) {
  return std::vector<int32_t>(count, from * 10'000 + tag * 100 + index);
}

EngineOptions bad_network(uint64_t seed) {
  EngineOptions options;
  options.segment_bytes = 4096;
  options.wrap_channel = [seed](std::unique_ptr<Channel> channel, int peer) -> std::unique_ptr<Channel> {
    return std::make_unique<FaultyChannel>(std::move(channel), seed + static_cast<uint64_t>(peer));
  };
  return options;
}

const std::vector<std::size_t> kCounts{0, 1, 1009, 16'384, 16'385, 70'000};

// Each rank sends all ranks one message of every size under two tags, in one order, and receives them in another one.
void exchange_everything(Rank& self) {
  std::vector<std::vector<int32_t>> sent, got, wanted;
  std::vector<std::shared_ptr<Work>> works;
  std::size_t all = 2 * kCounts.size() * static_cast<std::size_t>(self.world);
  sent.reserve(all), got.reserve(all), wanted.reserve(all);
  for (int tag : {1, 0})
    for (int other = 0; other < self.world; ++other)
      for (std::size_t i = 0; i < kCounts.size() && other != self.rank; ++i) {
        auto& memory = sent.emplace_back(message(self.rank, tag, static_cast<int>(i), kCounts[i]));
        works.push_back(self.group->send(bytes_of(memory), DType::kInt32, other, tag, {}));
      }
  for (int tag : {0, 1})
    for (int other = self.world - 1; other >= 0; --other)
      for (std::size_t i = 0; i < kCounts.size() && other != self.rank; ++i) {
        auto& memory = got.emplace_back(kCounts[i]);
        wanted.push_back(message(other, tag, static_cast<int>(i), kCounts[i]));
        works.push_back(self.group->receive(bytes_of(memory), DType::kInt32, other, tag, {}));
      }
  for (const auto& work : works) self.wait(work);
  CHECK(got == wanted);
}

}  // namespace

CASE("messages meet by sender, receiver and tag, in their order") {
  for (int world : {2, 5}) run_job(world, {}, exchange_everything);
  run_job(3, {}, exchange_everything, 30'000, bad_network(11));
}

CASE("several threads of a rank send and receive while collectives run") {
  run_job(3, {}, [&](Rank& self) {
    std::vector<std::thread> threads;
    for (int tag = 0; tag < 4; ++tag)
      threads.emplace_back([&self, tag] {
        int after = (self.rank + 1) % self.world, before = (self.rank + self.world - 1) % self.world;
        for (int i = 0; i < 40; ++i) {
          std::size_t count = kCounts[static_cast<std::size_t>(i) % kCounts.size()];
          auto out = message(self.rank, tag, i, count);
          std::vector<int32_t> in(count);
          auto sending = self.group->send(bytes_of(out), DType::kInt32, after, tag, {});
          self.wait(self.group->receive(bytes_of(in), DType::kInt32, before, tag, {}));
          self.wait(sending);
          CHECK(in == message(before, tag, i, count));
        }
      });
    for (int i = 0; i < 60; ++i) {
      std::vector<int32_t> ones(static_cast<std::size_t>(1 + i * 700), 1);
      self.wait(self.group->all_reduce(bytes_of(ones), DType::kInt32, ReduceOp::kSum, {}));
      CHECK_EQ(ones.back(), self.world);
    }
    for (std::thread& thread : threads) thread.join();
  });
}

CASE("a receive from anybody takes every message once and says whose it was") {
  for (std::size_t count : {std::size_t{3}, std::size_t{70'000}})
    run_job(4, {}, [&](Rank& self) {
      constexpr int kEach = 6;
      if (self.rank != 0) {
        for (int i = 0; i < kEach; ++i) {
          auto out = message(self.rank, 7, i, count);
          self.wait(self.group->send(bytes_of(out), DType::kInt32, 0, 7, {}));
        }
        return;
      }
      std::vector<int> seen(4, 0);
      for (int i = 0; i < 3 * kEach; ++i) {
        std::vector<int32_t> in(count);
        auto work = self.group->receive(bytes_of(in), DType::kInt32, PointToPoint::kAny, 7, {});
        self.wait(work);
        int from = work->source();
        CHECK(in == message(from, 7, seen[static_cast<std::size_t>(from)]++, count));
      }
      CHECK(seen == std::vector<int>({0, kEach, kEach, kEach}));
    });
}

CASE("reduce, gather, scatter and all-to-all from every root, in flight together") {
  for (auto [world, bad] : {std::pair(1, false), {2, true}, {3, false}, {5, true}})
    run_job(
        world, {},
        [world](Rank& self) {
          auto n = static_cast<std::size_t>(world);
          constexpr std::size_t kCount = 40'003;
          for (int root = 0; root < world; root += 2) {
            std::vector<int32_t> sum(kCount, self.rank + 1), mine(kCount, self.rank), back(kCount);
            std::vector<std::vector<int32_t>> gathered(n, std::vector<int32_t>(kCount));
            std::vector<std::vector<int32_t>> out, in;
            for (std::size_t r = 0; r < n; ++r) {
              out.push_back(
                  message(self.rank, static_cast<int>(r), root, 17 * (static_cast<std::size_t>(self.rank) + r)));
              in.emplace_back(out.back().size());
            }
            std::vector<std::span<std::byte>> blocks, chunks, rooms;
            if (self.rank == root)
              for (auto& block : gathered) blocks.push_back(bytes_of(block));
            for (auto& chunk : out) chunks.push_back(bytes_of(chunk));
            for (auto& room : in) rooms.push_back(bytes_of(room));
            std::vector<std::shared_ptr<Work>> works{
                self.group->reduce(bytes_of(sum), DType::kInt32, ReduceOp::kSum, root, {}),
                self.group->gather(bytes_of(mine), blocks, DType::kInt32, root, {}),
                self.group->scatter(blocks, bytes_of(back), DType::kInt32, root, {}),
                self.group->all_to_all(chunks, rooms, DType::kInt32, {})};
            for (const auto& work : works) self.wait(work);
            CHECK_EQ(sum[kCount - 1], self.rank == root ? world * (world + 1) / 2 : self.rank + 1);
            CHECK(back == mine);  // what the root gathered, given back
            for (std::size_t r = 0; r < n; ++r)
              CHECK(in[r] == message(static_cast<int>(r), self.rank, root, in[r].size()));
          }
        },
        30'000, bad ? bad_network(3) : EngineOptions{});
}

CASE("what cannot copy its buffers fails, at the start and at the end, and never counts as done") {
  for (bool at_start : {true, false})
    for (bool barrier : {true, false})
      run_job(2, {}, [&](Rank& self) {
        std::vector<int32_t> data(1000, 1);
        CallOptions options;
        auto fail = [] { throw std::runtime_error("no memory for a copy"); };
        if (self.rank == 0) (at_start ? options.before : options.after) = fail;
        std::string text;
        try {
          auto work = barrier
                          ? self.group->barrier(std::move(options))
                          : self.group->all_reduce(bytes_of(data), DType::kInt32, ReduceOp::kSum, std::move(options));
          self.wait(work);
        } catch (const std::exception& error) {
          text = error.what();
        }
        if (at_start || self.rank == 0) CHECK(text.find("no memory for a copy") != std::string::npos);
      });
}

CASE("a receive whose sender leaves fails and names it") {
  run_job(2, {}, [&](Rank& self) {
    if (self.rank == 1) return;
    for (int from : {1, static_cast<int>(PointToPoint::kAny)}) {
      std::vector<int32_t> in(8);
      try {
        self.wait(self.group->receive(bytes_of(in), DType::kInt32, from, 0, {}));
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kPeerLost);
        CHECK_EQ(error.context().peer, 1);
      }
    }
  });
}

}  // namespace ringdp::testing
