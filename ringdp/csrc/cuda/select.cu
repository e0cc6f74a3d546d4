// Threshold select, in ascending order and the same on every run: one pass over x leaves a bit per element and a count
// per tile, a scan turns counts into places, and a pass over the bits reads those elements that were selected. So x is
// read once, as long as few are selected; no block of threads waits for another.
#include "base/host_device.h"
#include "cuda/launch.cuh"

namespace ringdp::cuda {
namespace {

constexpr unsigned kWordsPerWarp = kWarp;  // each lane keeps one word of bits
constexpr unsigned kWarpElements = kWordsPerWarp * kWarp;
constexpr unsigned kTile = kWarps * kWarpElements;
constexpr unsigned kAtOnce = 16;  // loads under way

__device__ inline uint32_t sum_of_warp(uint32_t value) {
#pragma unroll
  for (unsigned apart = kWarp / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(kAllLanes, value, apart);
  return value;
}

// The sum over this lane and those before it.
__device__ inline uint32_t sum_up_to_lane(uint32_t value, unsigned lane) {
#pragma unroll
  for (unsigned apart = 1; apart < kWarp; apart *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, value, apart);
    if (lane >= apart) value += before;
  }
  return value;
}

// The sum of the values of all warps before this one. Called by all threads of the block.
__device__ inline uint32_t sum_of_warps_before(uint32_t of_warp, uint32_t* total) {
  __shared__ uint32_t sums[kWarps];
  const unsigned warp = threadIdx.x / kWarp;
  if (threadIdx.x % kWarp == 0) sums[warp] = of_warp;
  __syncthreads();
  uint32_t before = 0, all = 0;
  for (unsigned i = 0; i < kWarps; ++i) {
    if (i < warp) before += sums[i];
    all += sums[i];
  }
  *total = all;
  return before;
}

__global__ void __launch_bounds__(kThreads)
    mark_kernel(const float* x, std::size_t count, float least, uint32_t* counts, uint32_t* words) {
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const std::size_t begin = static_cast<std::size_t>(blockIdx.x) * kTile + warp * kWarpElements;
  const unsigned here = begin >= count ? 0 : static_cast<unsigned>(min(count - begin, std::size_t{kWarpElements}));
  uint32_t word = 0;
#pragma unroll
  for (unsigned first = 0; first < kWordsPerWarp; first += kAtOnce) {
    float loaded[kAtOnce];
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) {
      const unsigned at = (first + i) * kWarp + lane;
      loaded[i] = at < here ? x[begin + at] : 0.0f;
    }
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) {
      const unsigned at = (first + i) * kWarp + lane;
      const uint32_t bits = __ballot_sync(kAllLanes, at < here && !(fabsf(loaded[i]) < least));
      if (lane == first + i) word = bits;
    }
  }
  words[static_cast<std::size_t>(blockIdx.x) * kThreads + threadIdx.x] = word;
  uint32_t total;
  sum_of_warps_before(sum_of_warp(static_cast<uint32_t>(__popc(word))), &total);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// counts[i] = the sum of all before i. One block of threads, each with a stretch of its own.
__global__ void __launch_bounds__(kThreads) scan_kernel(uint32_t* counts, unsigned size, uint32_t* selected) {
  const unsigned stretch = (size + kThreads - 1) / kThreads;
  const unsigned begin = min(size, threadIdx.x * stretch), end = min(size, begin + stretch);
  uint32_t sum = 0;
#pragma unroll 8
  for (unsigned i = begin; i < end; ++i) sum += counts[i];
  const uint32_t up_to = sum_up_to_lane(sum, threadIdx.x % kWarp);
  uint32_t all;
  uint32_t place = up_to - sum + sum_of_warps_before(__shfl_sync(kAllLanes, up_to, kWarp - 1), &all);
#pragma unroll 8
  for (unsigned i = begin; i < end; ++i) {
    const uint32_t here = counts[i];
    counts[i] = place;
    place += here;
  }
  if (threadIdx.x == 0) *selected = all;
}

__global__ void __launch_bounds__(kThreads) gather_kernel(const float* x, const uint32_t* places, const uint32_t* words,
                                                          uint32_t* index, float* value, std::size_t capacity) {
  uint32_t word = words[static_cast<std::size_t>(blockIdx.x) * kThreads + threadIdx.x];
  const auto here = static_cast<uint32_t>(__popc(word));
  const uint32_t up_to = sum_up_to_lane(here, threadIdx.x % kWarp);
  uint32_t all;
  std::size_t place = places[blockIdx.x] + up_to - here;
  place += sum_of_warps_before(__shfl_sync(kAllLanes, up_to, kWarp - 1), &all);
  const uint32_t first = (blockIdx.x * kThreads + threadIdx.x) * kWarp;
  for (; word != 0 && place < capacity; word &= word - 1, ++place) {
    const uint32_t at = first + static_cast<uint32_t>(__ffs(static_cast<int>(word))) - 1;
    index[place] = at;
    value[place] = x[at];
  }
}

}  // namespace

std::size_t select_scratch_bytes(std::size_t count) {
  return tiles_of(count, kTile) * (1 + kThreads) * sizeof(uint32_t);
}

void select(const float* x, std::size_t count, float threshold, uint32_t* index, float* value, std::size_t capacity,
            uint32_t* selected, void* scratch, Stream stream) {
  if (count > UINT32_MAX)
    throw Error(ErrorKind::kValue, "cuda: select: " + std::to_string(count) + " elements; an index has 32 bits");
  const std::size_t tiles = tiles_of(count, kTile);
  auto* counts = static_cast<uint32_t*>(scratch);
  uint32_t* words = counts + tiles;
  launch("select: mark", stream, tiles, mark_kernel, x, count, threshold, counts, words);
  launch("select: scan", stream, 1, scan_kernel, counts, static_cast<unsigned>(tiles), selected);
  launch("select: gather", stream, tiles, gather_kernel, x, counts, words, index, value, capacity);
}

}  // namespace ringdp::cuda
