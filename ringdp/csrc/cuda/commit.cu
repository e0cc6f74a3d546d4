// commit: publishes the residuals written last.
#include <algorithm>

#include "cuda/launch.cuh"

namespace ringdp::cuda {
namespace {

constexpr std::size_t kAtOnce = 480;  // pointers in a kernel's parameters

struct Switches {
  int32_t* which[kAtOnce];
  unsigned count;
};

__global__ void __launch_bounds__(kThreads)
    commit_kernel(const __grid_constant__ Switches switches, const int32_t* non_finite) {
  if (non_finite != nullptr && *non_finite != 0) return;
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  if (i < switches.count) *switches.which[i] = 1 - *switches.which[i];
}

}  // namespace

void commit(std::span<int32_t* const> which, const int32_t* non_finite, Stream stream) {
  Switches switches{};
  for (std::size_t begin = 0; begin < which.size(); begin += kAtOnce) {
    const auto these = which.subspan(begin, std::min(kAtOnce, which.size() - begin));
    std::copy(these.begin(), these.end(), switches.which);
    switches.count = static_cast<unsigned>(these.size());
    launch("commit residuals", stream, tiles_of(these.size(), kThreads), commit_kernel, switches, non_finite);
  }
}

}  // namespace ringdp::cuda
