// Many runs in one launch: a table of them travels as a parameter of the kernel (4 KB at most), so nothing is copied
// to the device. Each block of threads takes one tile of one run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/launch.cuh"

namespace ringdp::cuda {

inline constexpr std::size_t kTableBytes = 3968;  // the rest of 4 KB is for the other parameters

template <class Run>
struct RunTable {
  static constexpr uint32_t kCapacity = (kTableBytes - 2 * sizeof(uint32_t)) / (sizeof(Run) + sizeof(uint32_t));

  Run runs[kCapacity];
  uint32_t first[kCapacity];  // tile of each run, counted through all of them
  uint32_t size;

  // Which run a tile belongs to.
  __device__ uint32_t run_of(uint32_t tile) const {
    uint32_t low = 0, high = size;
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (first[middle] <= tile ? low : high) = middle;
    }
    return low;
  }
};

// Calls launch(table, tiles) for each full table, and for the rest; runs without elements are left out. Run has a
// member count.
template <class Run>
class RunTables {
 public:
  explicit RunTables(std::size_t tile) : tile_(tile) { static_assert(sizeof(RunTable<Run>) <= kTableBytes); }

  template <class Launch>
  void add(const Run& run, Launch&& launch) {
    if (run.count == 0) return;
    if (table_.size == RunTable<Run>::kCapacity) flush(launch);
    table_.runs[table_.size] = run;
    table_.first[table_.size++] = tiles_;
    tiles_ += static_cast<uint32_t>(tiles_of(run.count, tile_));
  }

  template <class Launch>
  void flush(Launch&& launch) {
    if (table_.size > 0) launch(table_, tiles_);
    table_.size = tiles_ = 0;
  }

 private:
  RunTable<Run> table_{};
  std::size_t tile_;
  uint32_t tiles_ = 0;
};

}  // namespace ringdp::cuda
