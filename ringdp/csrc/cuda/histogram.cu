// magnitude_histogram: each block of threads counts in shared memory. Gradients crowd into few bins, so that lanes side by
// side count in copies of their own.
#include <algorithm>

#include "base/host_device.h"
#include "cuda/launch.cuh"

namespace ringdp::cuda {
namespace {

constexpr unsigned kBins = 2048;
constexpr unsigned kCopies = 4;
constexpr unsigned kAtOnce = 8;  // loads under way
constexpr std::size_t kTile = kThreads * kAtOnce;
constexpr std::size_t kBlocksPerProcessor = 6;  // 32 KiB of shared memory each

__global__ void __launch_bounds__(kThreads) histogram_kernel(const float* x, std::size_t count, uint32_t* histogram) {
  __shared__ uint32_t bins[kBins * kCopies];
  for (unsigned i = threadIdx.x; i < kBins * kCopies; i += kThreads) bins[i] = 0;
  __syncthreads();
  for (std::size_t begin = blockIdx.x * kTile; begin < count; begin += gridDim.x * kTile) {
    uint32_t bits[kAtOnce];
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) {
      const std::size_t at = begin + i * kThreads + threadIdx.x;
      bits[i] = at < count ? bits_as<uint32_t>(x[at]) : 0;
    }
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i)
      if (begin + i * kThreads + threadIdx.x < count)
        atomicAdd(&bins[(bits[i] & 0x7fffffffu) / (0x80000000u / kBins) * kCopies + threadIdx.x % kCopies], 1u);
  }
  __syncthreads();
  for (unsigned bin = threadIdx.x; bin < kBins; bin += kThreads) {
    uint32_t sum = 0;
    for (unsigned copy = 0; copy < kCopies; ++copy) sum += bins[bin * kCopies + copy];
    if (sum > 0) atomicAdd(&histogram[bin], sum);
  }
}

std::size_t processors() {
  int device = 0, found = 0;
  check(cudaGetDevice(&device), "find the current device");
  check(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device), "count the device's processors");
  return static_cast<std::size_t>(found);
}

}  // namespace

void magnitude_histogram(const float* x, std::size_t count, uint32_t* histogram, Stream stream) {
  const std::size_t tiles = tiles_of(count, kTile);
  if (tiles == 0) return;
  launch("make a histogram", stream, std::min(tiles, processors() * kBlocksPerProcessor), histogram_kernel, x, count,
         histogram);
}

}  // namespace ringdp::cuda
