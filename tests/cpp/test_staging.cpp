// Collectives on a device's memory (device/staging.h), which here is a SlowDevice's: copies late and out of order,
// poison in host memory until they are done. The result must have the bits that it has without a device, on all ranks,
// and what goes wrong in the middle must leave no copy that touches freed memory.
#include <array>
#include <limits>
#include <list>
#include <thread>

#include "job.h"
#include "slow_device.h"

namespace ringdp::testing {
namespace {

// What an operation has on the device and here. Held by the operation, as the buffers of a caller are.
struct Mirrors {
  explicit Mirrors(SlowDevice& device) : staging(std::make_shared<Staging>(device.make_queue())) {}
  ~Mirrors() { staging->queue().wait(); }  // where the operation was refused; else nothing is under way

  template <class T>
  std::span<std::byte> add(std::vector<T>& tensor, bool reads, bool writes) {
    auto& host = hosts.emplace_back(tensor.size() * sizeof(T));
    staging->mirror(host, reinterpret_cast<std::byte*>(tensor.data()), reads, writes);
    return host;
  }
  static CallOptions options(const std::shared_ptr<Mirrors>& it) {
    CallOptions out;
    out.staging = it->staging;
    out.keep_alive = it;
    return out;
  }

  std::shared_ptr<Staging> staging;
  std::list<std::vector<std::byte>> hosts;
};

std::shared_ptr<Mirrors> mirrors_on(SlowDevice& device) { return std::make_shared<Mirrors>(device); }

float value(int rank, std::size_t i) {
  return static_cast<float>((i * 2654435761ULL + static_cast<std::size_t>(rank) * 40503ULL) % 20011) / 127.0F - 50.0F;
}

std::vector<float> filled(int rank, std::size_t count, std::size_t salt = 0) {
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = value(rank, i + salt);
  return out;
}

// Some ranks' tensors are on a device, the others' are not: the same operation, the same bits.
void check_all_reduce(const AlgorithmTable& table, int world, std::size_t count, DType dtype, unsigned staged,
                      uint64_t seed) {
  std::vector<std::vector<float>> wanted(static_cast<std::size_t>(world)), got(static_cast<std::size_t>(world));
  run_job(world, table, [&](Rank& self) {
    auto place = static_cast<std::size_t>(self.rank);
    wanted[place] = filled(self.rank, count);
    self.wait(self.group->all_reduce(bytes_of(wanted[place]), dtype, ReduceOp::kAvg, {}));

    SlowDevice device(seed + place);
    std::vector<std::vector<float>> tensors(3, filled(self.rank, count));
    std::vector<std::shared_ptr<Work>> works;
    std::vector<std::shared_ptr<Staging>> stagings;
    for (auto& tensor : tensors) {  // several at once
      if ((staged >> self.rank & 1) == 0) {
        works.push_back(self.group->all_reduce(bytes_of(tensor), dtype, ReduceOp::kAvg, {}));
        continue;
      }
      auto mirrors = mirrors_on(device);
      auto memory = mirrors->add(tensor, true, true);
      stagings.push_back(mirrors->staging);
      works.push_back(self.group->all_reduce(memory, dtype, ReduceOp::kAvg, Mirrors::options(mirrors)));
    }
    for (const auto& work : works) self.wait(work);
    for (const auto& staging : stagings) staging->queue().wait();
    for (const auto& tensor : tensors) CHECK(same_bits(tensor, wanted[place]));
    got[place] = tensors[0];
    self.wait(self.group->barrier({}));
    self.runtime->shut_down();
    works.clear();
    stagings.clear();
  });
  for (const auto& one : got) CHECK(same_bits(one, got[0]));
}

}  // namespace

CASE("an all-reduce of device memory has the bits of one of this memory, whichever ranks have a device") {
  const std::array tables{kFoldAlways, kNeverSmall, kTreeAlways, kHalvingAlways};
  for (uint64_t seed = 0; seed < 48; ++seed) {
    const std::size_t count = std::array{16'389UL, 120'003UL, seed % 2}[seed / 16];
    check_all_reduce(tables[seed / 4 % 4], 1 + static_cast<int>(seed % 4), count, DType::kFloat32,
                     seed % 5 < 2 ? 2U : 0xffU, seed);
  }
}

CASE("half types, which go pairwise") {
  uint64_t seed = 100;
  for (int world : {2, 3})
    for (unsigned staged : {0xffU, 2U}) check_all_reduce(kNeverSmall, world, 300'003, DType::kBfloat16, staged, ++seed);
}

CASE("half types along a tree and by halving, whose sums are wider than they are") {
  uint64_t seed = 200;
  for (int world : {3, 5})
    for (unsigned staged : {0xffU, 2U})
      for (const AlgorithmTable& table : {kTreeAlways, kHalvingAlways})
        check_all_reduce(table, world, 100'003, DType::kBfloat16, staged, ++seed);
}

CASE("many pieces, copied back before the end") {
  constexpr std::size_t kCount = 3 * Staging::kPieceBytes / sizeof(float) + 1;
  check_all_reduce(kNeverSmall, 2, kCount, DType::kFloat32, 0xff, 7);
  check_all_reduce(kFoldAlways, 3, kCount, DType::kFloat32, 0xff, 8);
  check_all_reduce(kTreeAlways, 4, kCount, DType::kFloat32, 0xff, 9);
}

CASE("every other collective") {
  uint64_t seed = 1000;
  for (int world : {1, 3}) {
    for (const AlgorithmTable& table : {kFoldAlways, kNeverSmall, kTreeAlways}) {
      for (std::size_t count : {std::size_t{0}, std::size_t{5}, std::size_t{40'007}}) {
        ++seed;
        run_job(world, table, [&](Rank& self) {
          SlowDevice device(seed * 17 + static_cast<uint64_t>(self.rank));
          auto n = static_cast<std::size_t>(world);
          auto run = [&](const std::shared_ptr<Mirrors>& mirrors, const std::shared_ptr<Work>& work) {
            self.wait(work);
            mirrors->staging->queue().wait();
          };
          for (int root = 0; root < world; ++root) {
            std::vector<float> tensor = self.rank == root ? filled(root, count) : std::vector<float>(count, -1.0F);
            auto mirrors = mirrors_on(device);
            auto memory = mirrors->add(tensor, self.rank == root, self.rank != root);
            run(mirrors, self.group->broadcast(memory, DType::kFloat32, root, Mirrors::options(mirrors)));
            CHECK(same_bits(tensor, filled(root, count)));

            tensor = filled(self.rank, count);
            std::vector<float> sum = filled(self.rank, count);
            self.wait(self.group->reduce(bytes_of(sum), DType::kFloat32, ReduceOp::kSum, root, {}));
            mirrors = mirrors_on(device);
            memory = mirrors->add(tensor, true, self.rank == root);
            run(mirrors, self.group->reduce(memory, DType::kFloat32, ReduceOp::kSum, root, Mirrors::options(mirrors)));
            CHECK(same_bits(tensor, sum));
          }
          // The input is a part of the output.
          std::vector<float> all(count * n, -1.0F), mine = filled(self.rank, count);
          auto own = static_cast<std::ptrdiff_t>(count) * self.rank;
          std::copy(mine.begin(), mine.end(), all.begin() + own);
          auto mirrors = mirrors_on(device);
          auto input = std::span(mirrors->hosts.emplace_back(count * sizeof(float)));
          mirrors->staging->mirror(input, reinterpret_cast<std::byte*>(all.data() + own), true, false);
          auto output = mirrors->add(all, false, true);
          std::vector<std::span<std::byte>> blocks;
          for (std::size_t i = 0; i < n; ++i) blocks.push_back(output.subspan(i * input.size(), input.size()));
          run(mirrors, self.group->all_gather(input, blocks, DType::kFloat32, Mirrors::options(mirrors)));
          for (int rank = 0; rank < world; ++rank) {
            std::vector<float> block(all.begin() + static_cast<std::ptrdiff_t>(count) * rank,
                                     all.begin() + static_cast<std::ptrdiff_t>(count) * (rank + 1));
            CHECK(same_bits(block, filled(rank, count)));
          }
          // And the other way round.
          std::vector<float> whole = filled(self.rank, count * n, 3), wanted(count);
          std::vector<float> chunks_here = whole;
          std::vector<std::span<std::byte>> chunks;
          for (std::size_t i = 0; i < n; ++i)
            chunks.push_back(bytes_of(chunks_here).subspan(i * count * sizeof(float), count * sizeof(float)));
          self.wait(self.group->reduce_scatter(chunks, bytes_of(wanted), DType::kFloat32, ReduceOp::kSum, {}));
          mirrors = mirrors_on(device);
          auto staged_input = mirrors->add(whole, true, false);
          auto staged_output = std::span(mirrors->hosts.emplace_back(count * sizeof(float)));
          mirrors->staging->mirror(staged_output, reinterpret_cast<std::byte*>(whole.data() + own), false, true);
          chunks.clear();
          for (std::size_t i = 0; i < n; ++i)
            chunks.push_back(staged_input.subspan(i * count * sizeof(float), count * sizeof(float)));
          run(mirrors, self.group->reduce_scatter(chunks, staged_output, DType::kFloat32, ReduceOp::kSum,
                                                  Mirrors::options(mirrors)));
          std::vector<float> part(whole.begin() + own, whole.begin() + own + static_cast<std::ptrdiff_t>(count));
          CHECK(same_bits(part, wanted));
          for (std::size_t i = 0; i < whole.size(); ++i)
            if (i / std::max<std::size_t>(count, 1) != static_cast<std::size_t>(self.rank))
              CHECK_EQ(whole[i], value(self.rank, i + 3));
          self.wait(self.group->barrier({}));
          self.runtime->shut_down();
        });
      }
    }
  }
}

CASE("messages, and operations that wait for their input while later ones go on") {
  run_job(3, kNeverSmall, [](Rank& self) {
    SlowDevice late(5 + static_cast<uint64_t>(self.rank)), device(50 + static_cast<uint64_t>(self.rank));
    late.hold(true);
    std::vector<float> first = filled(self.rank, 100'000), second(1000, static_cast<float>(self.rank + 1));
    auto held = mirrors_on(late);
    auto memory = held->add(first, true, true);
    // On two ranks the first one's input does not come; what the third sends for it must wait for them, in order.
    auto options = self.rank == 2 ? CallOptions{} : Mirrors::options(held);
    std::vector<float> copy = filled(self.rank, 100'000);
    auto work = self.group->all_reduce(self.rank == 2 ? bytes_of(copy) : memory, DType::kFloat32, ReduceOp::kSum,
                                       std::move(options));
    // It starts, though the first has not; but they end in order.
    auto next = self.group->all_reduce(bytes_of(second), DType::kFloat32, ReduceOp::kSum, {});
    std::vector<float> sent = filled(self.rank, 50'000), got(50'000, -1.0F);
    auto out = mirrors_on(device), in = mirrors_on(device);
    const int after = (self.rank + 1) % 3, before = (self.rank + 2) % 3;
    auto received = in->add(got, false, true);
    auto receiving = self.group->receive(received, DType::kFloat32, before, 4, Mirrors::options(in));
    auto message = out->add(sent, true, false);
    self.wait(self.group->send(message, DType::kFloat32, after, 4, Mirrors::options(out)));
    self.wait(receiving);
    in->staging->queue().wait();
    CHECK(same_bits(got, filled(before, 50'000)));
    CHECK(self.rank == 2 || !work->finished());
    late.hold(false);
    self.wait(next);
    self.wait(work);
    held->staging->queue().wait();
    CHECK(second == std::vector<float>(1000, 6.0F));
    std::vector<float> wanted = filled(self.rank, 100'000);
    self.wait(self.group->all_reduce(bytes_of(wanted), DType::kFloat32, ReduceOp::kSum, {}));
    CHECK(same_bits(self.rank == 2 ? copy : first, wanted));
    self.wait(self.group->barrier({}));
    self.runtime->shut_down();
  });
}

CASE("input that never comes is a timeout that names the rank and its device, on all ranks") {
  for (const AlgorithmTable& table : {kFoldAlways, kNeverSmall, kTreeAlways}) {
    auto body = [&](Rank& self) {
      SlowDevice device(3);
      std::vector<float> tensor = filled(self.rank, 100'000);
      {
        auto mirrors = mirrors_on(device);
        device.hold(self.rank == 1);
        auto memory = mirrors->add(tensor, true, true);
        auto work = self.group->all_reduce(memory, DType::kFloat32, ReduceOp::kSum, Mirrors::options(mirrors));
        mirrors.reset();
        const std::string text = CHECK_THROWS(ErrorKind::kTimeout, self.wait(work));
        CHECK(text.find("device") != std::string::npos);
        CHECK(text.find("all_reduce") != std::string::npos);
        CHECK(text.find(self.rank == 1 ? "this rank's own device" : "rank 1 (host ") != std::string::npos ||
              text.find("reported by rank") != std::string::npos);
      }
      // The engine still holds the buffers: the copies would be found out by the sanitizers.
      device.hold(false);
      self.runtime->shut_down();
    };
    run_job(3, table, body, 800);
  }
}

CASE("a group that is aborted in the middle of its copies, and works that nobody waits for") {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    // They outlive the engines: on a loaded machine `shut_down` gives up before the last copy has ended.
    std::array<SlowDevice, 2> devices{SlowDevice(seed * 2), SlowDevice(seed * 2 + 1)};
    run_job(2, kNeverSmall, [&](Rank& self) {
      SlowDevice& device = devices[static_cast<std::size_t>(self.rank)];
      auto tensors = std::make_shared<std::vector<std::vector<float>>>(4, filled(self.rank, 300'000));
      std::vector<std::shared_ptr<Work>> works;
      try {
        for (auto& tensor : *tensors) {
          auto mirrors = mirrors_on(device);
          auto memory = mirrors->add(tensor, true, true);
          works.push_back(self.group->all_reduce(memory, DType::kFloat32, ReduceOp::kSum, Mirrors::options(mirrors)));
        }
        if (seed % 2 == 0) works.resize(2);
        if (self.rank == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(100 * seed));
          self.runtime->engine().abort("enough");
        }
        for (const auto& work : works) self.wait(work);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kState || error.kind() == ErrorKind::kPeerLost);
      }
      works.clear();
      self.runtime->shut_down();
    });
  }
}

CASE("a peer that leaves while copies are under way is named, and no memory is touched afterwards") {
  run_job(3, kNeverSmall, [](Rank& self) {
    SlowDevice device(11 + static_cast<uint64_t>(self.rank));
    if (self.rank == 2) return self.runtime->shut_down();
    device.hold(true);
    std::vector<float> tensor = filled(self.rank, 300'000);
    auto mirrors = mirrors_on(device);
    auto memory = mirrors->add(tensor, true, true);
    auto work = self.group->all_reduce(memory, DType::kFloat32, ReduceOp::kSum, Mirrors::options(mirrors));
    mirrors.reset();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    device.hold(false);
    const std::string text = CHECK_THROWS(ErrorKind::kPeerLost, self.wait(work));
    CHECK(text.find("rank 2 (host ") != std::string::npos);
    self.runtime->shut_down();
  });
}

CASE("a watched all-reduce finds what is not finite, at its place in the mirror") {
  for (const AlgorithmTable& table : {kFoldAlways, kNeverSmall}) {
    run_job(2, table, [](Rank& self) {
      SlowDevice device(21 + static_cast<uint64_t>(self.rank));
      std::vector<float> tensor = filled(self.rank, 500'000);
      if (self.rank == 1) tensor[333'333] = std::numeric_limits<float>::infinity();
      auto mirrors = mirrors_on(device);
      auto memory = mirrors->add(tensor, true, true);
      auto options = Mirrors::options(mirrors);
      auto report = options.finite = std::make_shared<FiniteReport>();
      self.wait(self.group->all_reduce(memory, DType::kFloat32, ReduceOp::kSum, std::move(options)));
      CHECK(!report->finite);
      const auto* wanted = self.rank == 1 ? reinterpret_cast<std::byte*>(tensor.data() + 333'333) : nullptr;
      CHECK(mirrors->staging->device_address(report->own) == wanted);
      mirrors->staging->queue().wait();
      self.wait(self.group->barrier({}));
      self.runtime->shut_down();
    });
  }
}

// The rest: what goes back, and when. Ranks and wire are not needed for that.

namespace {

// Carries nothing out by itself.
class ByHand final : public CopyQueue {
 public:
  struct Copy {
    std::byte* to;
    std::size_t bytes;
    bool done = false;
  };
  std::vector<Copy> copies;

  void after_caller() override {}
  Ticket to_host(std::byte* host, const std::byte*, std::size_t bytes) override { return add(host, bytes); }
  Ticket to_device(std::byte* device, const std::byte*, std::size_t bytes) override { return add(device, bytes); }
  Ticket follow(std::function<void()> work) override {
    work();
    return add(nullptr, 0);
  }
  bool done(Ticket ticket) override { return copies[ticket].done; }
  void after_all(const std::function<void()>& what) override { what(); }
  void order_caller() override {}
  void wait() override {}

 private:
  Ticket add(std::byte* to, std::size_t bytes) {
    copies.push_back({to, bytes});
    return copies.size() - 1;
  }
};

constexpr std::size_t kPiece = Staging::kPieceBytes;

}  // namespace

CASE("input counts from its start, though copies end in any order") {
  auto queue = std::make_unique<ByHand>();
  ByHand& hand = *queue;
  Staging staging(std::move(queue));
  std::vector<std::byte> host(3 * kPiece + 5), device(host.size());
  const std::span<std::byte> all(host);
  staging.mirror(all, device.data(), true, false);
  REQUIRE(hand.copies.size() == 4);
  hand.copies[2].done = hand.copies[1].done = true;
  CHECK(!staging.poll());
  CHECK_EQ(staging.there(all), std::size_t{0});
  hand.copies[0].done = true;
  CHECK(staging.poll());
  CHECK_EQ(staging.there(all), 3 * kPiece);
  CHECK_EQ(staging.there(all.subspan(kPiece + 7, 10)), std::size_t{10});
  CHECK_EQ(staging.there(all.subspan(3 * kPiece - 7, 10)), std::size_t{7});
  CHECK_EQ(staging.there(all.subspan(3 * kPiece, 5)), std::size_t{0});
  CHECK(!staging.all_there());
  hand.copies[3].done = true;
  CHECK(staging.poll());
  CHECK(staging.all_there());
  CHECK(staging.landed());
}

CASE("a piece goes back when all of it is final, the rest at the end, each byte once") {
  auto queue = std::make_unique<ByHand>();
  ByHand& hand = *queue;
  Staging staging(std::move(queue));
  std::vector<std::byte> host(4 * kPiece + 100), device(host.size());
  const std::span<std::byte> all(host);
  bool followed = false;
  staging.mirror(all, device.data(), false, true);
  staging.at_end([&] { followed = true; });
  staging.final(all.subspan(kPiece - 64, kPiece));  // ends of two
  CHECK(hand.copies.empty());
  staging.final(all.subspan(2 * kPiece - 64, 64));
  REQUIRE(hand.copies.size() == 1);
  CHECK(hand.copies[0].to == device.data() + kPiece);
  CHECK_EQ(hand.copies[0].bytes, kPiece);
  std::vector<std::byte> other(10);
  staging.final(other);
  CHECK(!followed);
  staging.finish();
  CHECK(followed);
  REQUIRE(hand.copies.size() == 4);  // piece 0; pieces 2 to the end; what follows
  CHECK(hand.copies[1].to == device.data());
  CHECK_EQ(hand.copies[1].bytes, kPiece);
  CHECK(hand.copies[2].to == device.data() + 2 * kPiece);
  CHECK_EQ(hand.copies[2].bytes, 2 * kPiece + 100);
  CHECK(!staging.landed());
  for (auto& copy : hand.copies) copy.done = true;
  CHECK(staging.landed());
}

CASE("a result does not overwrite input on the device that has not come; told twice, it goes again at the end") {
  auto queue = std::make_unique<ByHand>();
  ByHand& hand = *queue;
  Staging staging(std::move(queue));
  std::vector<std::byte> input(10), output(kPiece), device(kPiece);
  staging.mirror(input, device.data(), true, false);
  staging.mirror(output, device.data(), false, true);
  staging.final(output);
  CHECK_EQ(hand.copies.size(), std::size_t{1});
  hand.copies[0].done = true;
  staging.poll();
  CHECK_EQ(hand.copies.size(), std::size_t{2});
  staging.final(std::span(output).first(64));
  staging.finish();
  CHECK_EQ(hand.copies.size(), std::size_t{3});
}

}  // namespace ringdp::testing
