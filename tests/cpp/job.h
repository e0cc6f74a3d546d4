// A job whose ranks are threads of this process: one Runtime and one group of all ranks per rank, real sockets
// between.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "engine/group.h"
#include "mesh/store.h"
#include "testing.h"

namespace ringdp::testing {

const AlgorithmTable kFoldAlways{1ULL << 40, 1ULL << 40, 1ULL << 40, 1ULL << 40};
const AlgorithmTable kNeverSmall{0, 0, 0, 0};
const AlgorithmTable kTreeAlways{1ULL << 40, 1ULL << 40, 1ULL << 40, 1ULL << 40, 2};  // of three ranks and more

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
  options.timeout_ms = 30'000;
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
    rendezvous.full_mesh_ranks = full_mesh_ranks;
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

}  // namespace ringdp::testing
