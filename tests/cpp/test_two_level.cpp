// Two levels: that both ends of every stream expect the same pieces, and what happens when ranks believe in different
// hosts.

#include "collective/two_level.h"
#include "job.h"

using namespace ringdp;
using namespace ringdp::testing;

namespace {

const std::vector<std::vector<int>> kLayouts{{0, 0, 1, 1}, {0, 1, 0, 1},          {0, 0, 0, 1},
                                             {0, 0, 1, 2}, {0, 1, 2, 2, 1, 0, 0}, {0, 1, 1, 2, 0, 2, 2, 1}};

struct OnRank {
  OnRank(const std::vector<int>& hosts, int rank, std::span<std::byte> memory, DType dtype, bool far)
      : map(view_of(hosts, rank)), plan(map, memory, dtype, ReduceOp::kAvg, far) {}

  HostMap map;
  AllReducePlan plan;
};

// Where in the buffer each piece between two ranks lies, in order.
std::vector<std::pair<std::size_t, std::size_t>> places(const std::vector<StagePlan::Stream>& streams, int member,
                                                        std::span<const std::byte> memory) {
  std::vector<std::pair<std::size_t, std::size_t>> out;
  for (const auto& stream : streams)
    if (stream.member == member)
      for (const auto& piece : stream.pieces)
        out.emplace_back(piece.stage->memory.data() - memory.data(), piece.stage->memory.size());
  return out;
}

}  // namespace

CASE("both ends of every stream find the same pieces of the buffer in the same order") {
  std::vector<std::byte> memory(5 * 1024 * 1024);
  for (const auto& hosts : kLayouts) {
    for (std::size_t bytes : {4UL, 4096UL, 1'000'004UL, memory.size()}) {
      for (auto [dtype, far] :
           {std::pair(DType::kFloat32, false), {DType::kBfloat16, false}, {DType::kFloat32, true}}) {
        auto span = std::span(memory).first(bytes);
        std::deque<OnRank> ranks;
        for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank)
          ranks.emplace_back(hosts, rank, span, dtype, far);
        std::size_t crossing = 0;
        for (std::size_t from = 0; from < ranks.size(); ++from)
          for (std::size_t to = 0; to < ranks.size(); ++to) {
            auto sent = places(ranks[from].plan.outgoing(), static_cast<int>(to), span);
            CHECK(sent == places(ranks[to].plan.incoming(), static_cast<int>(from), span));
            if (hosts[from] != hosts[to])
              for (auto [begin, size] : sent) crossing += size;
          }
        std::size_t h = static_cast<std::size_t>(ranks[0].map.count());
        CHECK_EQ(crossing, 2 * (h - 1) * bytes);
      }
    }
  }
}

CASE("both ends of a reduce-scatter's streams find pieces of the same sizes, and each sum crosses once") {
  for (const auto& hosts : kLayouts) {
    for (std::size_t bytes : {4UL, 4096UL, 1'000'004UL}) {
      std::vector<std::byte> memory(bytes);
      std::vector<std::span<std::byte>> chunks(hosts.size(), memory);
      std::vector<std::vector<std::vector<std::size_t>>> sent, received;  // [rank][member]: sizes of pieces
      for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
        HostMap map(view_of(hosts, rank));
        ReduceScatterPlan plan(map, chunks, memory, DType::kFloat32, ReduceOp::kSum);
        auto sizes = [&](const std::vector<StagePlan::Stream>& streams) {
          std::vector<std::vector<std::size_t>> of(hosts.size());
          for (const auto& stream : streams)
            for (const auto& piece : stream.pieces)
              of[static_cast<std::size_t>(stream.member)].push_back(piece.stage->size);
          return of;
        };
        sent.push_back(sizes(plan.outgoing()));
        received.push_back(sizes(plan.incoming()));
      }
      std::size_t crossing = 0, due = 0;
      for (std::size_t from = 0; from < hosts.size(); ++from)
        for (std::size_t to = 0; to < hosts.size(); ++to) {
          CHECK(sent[from][to] == received[to][from]);
          if (hosts[from] == hosts[to]) continue;
          for (std::size_t size : sent[from][to]) crossing += size;
        }
      int most = *std::max_element(hosts.begin(), hosts.end());
      for (std::size_t owner = 0; owner < hosts.size(); ++owner) due += static_cast<std::size_t>(most) * bytes;
      CHECK_EQ(crossing, due);
    }
  }
}

CASE("ranks of a host carry about as much as each other") {
  std::vector<std::byte> memory(32 * 1024 * 1024);
  for (const auto& hosts : kLayouts) {
    std::vector<std::size_t> across(hosts.size());
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      OnRank one(hosts, static_cast<int>(rank), memory, DType::kFloat32, false);
      for (const auto& stream : one.plan.outgoing())
        if (hosts[static_cast<std::size_t>(stream.member)] != hosts[rank]) across[rank] += stream.total;
    }
    for (std::size_t a = 0; a < hosts.size(); ++a)
      for (std::size_t b = 0; b < hosts.size(); ++b)
        if (hosts[a] == hosts[b]) CHECK(across[a] < across[b] * 11 / 10);
  }
}

CASE("ranks that believe in different hosts all hear of it, whatever the algorithm") {
  for (std::size_t count : {100UL, 300'000UL}) {
    MemoryStore store;
    run_ranks(4, [&](int rank) {
      Mesh mesh = meet(store, rendezvous_options(rank, 4));
      const char* believed[] = {"a", "a", "b", "b"};
      for (std::size_t i = 0; i < 4; ++i) mesh.peers[i].host_identity = believed[i];
      if (rank == 3) std::swap(mesh.peers[1].host_identity, mesh.peers[2].host_identity);
      auto runtime = std::make_shared<Runtime>(rank, std::move(mesh), EngineOptions{});
      GroupHandle group(runtime, "g", everybody(4), 10'000, AlgorithmTable{});
      std::vector<float> data(count, 1.0F);
      std::string message = CHECK_THROWS(
          ErrorKind::kMismatch, group.wait(*group.all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {})));
      CHECK(message.find("rank 3") != std::string::npos);
      CHECK(message.find("which ranks share a host") != std::string::npos);
      CHECK_THROWS(ErrorKind::kMismatch, group.barrier({}));
    });
  }
}

CASE("a rank that is not there is named, and the others wait no longer than their time") {
  MemoryStore store;
  run_ranks(4, [&](int rank) {
    RendezvousOptions options = rendezvous_options(rank, 4);
    options.host.id = rank < 2 ? "a" : "b";
    auto runtime = std::make_shared<Runtime>(store, options, EngineOptions{});
    GroupHandle group(runtime, "g", everybody(4), 400, AlgorithmTable{});
    std::vector<float> data(300'000, 1.0F);
    group.wait(*group.all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
    CHECK_EQ(data[299'999], 4.0F);
    if (rank == 2) {
      // Silent until the others have given up; then it hears of it.
      std::string heard = CHECK_THROWS(ErrorKind::kTimeout, [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
        for (;;) group.wait(*group.all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {}));
      }());
      return;
    }
    std::string message = CHECK_THROWS(
        ErrorKind::kTimeout, group.wait(*group.all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {})));
    CHECK(message.find("rank 2") != std::string::npos);
  });
}

CASE("sums of several hosts, several in flight, with small segments") {
  for (const auto& hosts : kLayouts) {
    MemoryStore store;
    int world = static_cast<int>(hosts.size());
    run_ranks(world, [&](int rank) {
      RendezvousOptions options = rendezvous_options(rank, world);
      options.host.id = std::to_string(hosts[static_cast<std::size_t>(rank)]);
      EngineOptions engine;
      engine.segment_bytes = 1000;
      auto runtime = std::make_shared<Runtime>(store, options, engine);
      GroupHandle group(runtime, "g", everybody(world), 30'000, kNeverSmall);
      std::vector<std::vector<int32_t>> data;
      std::vector<std::shared_ptr<Work>> works;
      for (std::size_t count : {1UL, 77UL, 100'000UL}) {
        data.emplace_back(count);
        for (std::size_t i = 0; i < count; ++i) data.back()[i] = static_cast<int32_t>(i) + rank;
        works.push_back(group.all_reduce(bytes_of(data.back()), DType::kInt32, ReduceOp::kSum, {}));
      }
      std::vector<int32_t> input(static_cast<std::size_t>(world) * 90'000, rank), output(90'000);
      std::vector<std::span<std::byte>> chunks;
      for (int to = 0; to < world; ++to)
        chunks.push_back(bytes_of(input).subspan(static_cast<std::size_t>(to) * 360'000, 360'000));
      works.push_back(group.reduce_scatter(chunks, bytes_of(output), DType::kInt32, ReduceOp::kSum, {}));
      for (auto& work : works) group.wait(*work);
      std::size_t wrong = 0;
      for (int32_t it : output) wrong += it != world * (world - 1) / 2;
      for (const auto& each : data)
        for (std::size_t i = 0; i < each.size(); ++i)
          wrong += each[i] != world * static_cast<int32_t>(i) + world * (world - 1) / 2;
      CHECK_EQ(wrong, std::size_t{0});
    });
  }
}
