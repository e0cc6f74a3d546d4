// How kernels are launched: every launch of this folder goes through launch(). Host code; any thread; the current
// device is the stream's.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "base/error.h"
#include "cuda/kernels.h"

namespace ringdp::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kThreads = 256;  // of every block of threads
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr unsigned kAllLanes = 0xffffffffu;

inline void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the next call would report as its own
  throw Error(ErrorKind::kSystem,
              std::string("cuda: cannot ") + doing + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// `doing` follows "cannot" in the message. Without blocks nothing is launched.
template <class... Parameters, class... Arguments>
void launch(const char* doing, Stream stream, std::size_t blocks, void (*kernel)(Parameters...),
            const Arguments&... arguments) {
  if (blocks == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, arguments...), doing);
}

inline constexpr std::size_t tiles_of(std::size_t count, std::size_t tile) { return (count + tile - 1) / tile; }

}  // namespace ringdp::cuda
