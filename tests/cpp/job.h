// A job whose ranks are threads of this process: one Runtime and one group of all ranks per rank, real sockets
// between.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "engine/group.h"
#include "meet/store.h"
#include "testing.h"

namespace ringdp::testing {

const AlgorithmTable kFoldAlways{1ULL << 40, 1ULL << 40, 1ULL << 40, 1ULL << 40};
const AlgorithmTable kNeverSmall{.fold_two_ranks_bytes = 0,
                                 .fold_sent_bytes = 0,
                                 .flat_broadcast_bytes = 0,
                                 .direct_gather_bytes = 0,
                                 .halving_rank_bytes = 0};
const AlgorithmTable kHalvingAlways{
    .fold_two_ranks_bytes = 0, .fold_sent_bytes = 0, .flat_broadcast_bytes = 0, .halving_rank_bytes = 1ULL << 40};
const AlgorithmTable kTreeAlways{// of three ranks and more
                                 .fold_two_ranks_bytes = 1ULL << 40,
                                 .fold_sent_bytes = 1ULL << 40,
                                 .flat_broadcast_bytes = 1ULL << 40,
                                 .direct_gather_bytes = 1ULL << 40,
                                 .direct_ranks = 2,
                                 .halving_rank_bytes = 0};
const AlgorithmTable kInPairs{
    .fold_two_ranks_bytes = 0, .fold_sent_bytes = 0, .flat_broadcast_bytes = 0, .pairwise_bytes = 1ULL << 30};

struct Rank {
  int rank;
  int world;
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<GroupHandle> group;

  void wait(const std::shared_ptr<Work>& work) { group->wait(*work); }
};

inline RendezvousOptions rendezvous_options(int rank, int world) {
  RendezvousOptions options;
  options.rank = rank;
  options.world = world;
  options.waiting.timeout_ms = 30'000;
  return options;
}

inline std::vector<int> everybody(int world) {
  std::vector<int> members(world);
  for (int i = 0; i < world; ++i) members[i] = i;
  return members;
}

// Runs `body` on every rank of a fresh job. A small `table` limit forces an algorithm; `full_mesh_ranks` below `world`
// leaves connections to be made when they are needed.
inline void run_job(int world, const AlgorithmTable& table, const std::function<void(Rank&)>& body,
                    int64_t timeout_ms = 30'000, const EngineOptions& options = {},
                    int full_mesh_ranks = kFullMeshRanks) {
  MemoryStore store;
  run_ranks(world, [&](int rank) {
    RendezvousOptions rendezvous = rendezvous_options(rank, world);
    rendezvous.links.full_mesh_ranks = full_mesh_ranks;
    auto runtime = std::make_shared<Runtime>(store, rendezvous, options);
    Rank self{rank, world, runtime,
              std::make_unique<GroupHandle>(runtime, "everybody", everybody(world), timeout_ms, table)};
    body(self);
  });
}

template <class T>
std::span<std::byte> bytes_of(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

// As many parts as there are ranks.
inline std::vector<std::span<std::byte>> parts(std::vector<float>& data, int world) {
  std::vector<std::span<std::byte>> out;
  const std::size_t bytes = data.size() / static_cast<std::size_t>(world) * sizeof(float);
  for (int i = 0; i < world; ++i) out.push_back(bytes_of(data).subspan(static_cast<std::size_t>(i) * bytes, bytes));
  return out;
}

// A rank's numbers, whose sums depend on their order.
inline std::vector<float> input_of(std::size_t count, int rank) {
  std::vector<float> data(count);
  std::mt19937 random(static_cast<unsigned>(rank) + 7);
  for (float& it : data) it = static_cast<float>(static_cast<int>(random() % 2000) - 1000) / 16.0F;
  return data;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

inline GroupView view_of(const std::vector<int>& hosts, int rank) {
  GroupView view;
  view.rank = rank;
  view.size = static_cast<int>(hosts.size());
  view.members = everybody(view.size);
  view.hosts = hosts;
  return view;
}

// The launcher's store, which outlives the ranks. `told`: after each value that a rank has put there.
class SharedStore final : public Store {
 public:
  explicit SharedStore(Store& store, std::function<void()> told = {}) : store_(store), told_(std::move(told)) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(key, value);
    if (told_) told_();
  }
  std::string set_first(const std::string& key, const std::string& value) override {
    return store_.set_first(key, value);
  }
  std::optional<std::string> find(const std::string& key) override { return store_.find(key); }

 private:
  Store& store_;
  const std::function<void()> told_;
};

}  // namespace ringdp::testing
