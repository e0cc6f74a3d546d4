// As much of CUDA as ringdp/csrc uses, on the CPU: the kernels are compiled as C++ with this folder in front of the
// toolkit's, and their index arithmetic, tails, shuffles and barriers run in every test. Blocks run one after the
// other, the threads of a block as fibers that change hands where they meet (device.cpp). When a kernel runs, and
// where it finds the memory of the device, is up to who links this: at_once.cpp for the tests beside it,
// tests/fake_cuda for its streams. What it cannot show: races between blocks, speed, and the bits of NaNs that the
// device's arithmetic makes. All kernels of a process run on one thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned all) : x(all) {}
};

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __stcs(float4* at, float4 value) { *at = value; }

inline dim3 threadIdx, blockIdx, gridDim;

namespace emulated {

inline constexpr unsigned kWarp = 32;
inline constexpr std::size_t kParameterBytes = 4096;

// ---- Of who links this
// Has `kernel` run once for each thread, by run_grid, now or when the stream gets there. Not cudaSuccess: it will not.
int launch(void* stream, unsigned blocks, unsigned threads, std::function<void()> kernel);
// Makes addresses of the device's memory, in words of eight bytes, those at which kernels reach it.
void map_addresses(uint64_t* words, std::size_t count);

// ---- device.cpp
// Runs body once for each thread of each block. Throws std::logic_error where threads wait for others in vain.
void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& body);

// The operations at which threads synchronise; all threads of one must have called the same.
enum class RendezvousRun { kShuffle, kBallot, kBlock };

// Waits for all lanes of the warp; what each of them brought.
const uint32_t* meet_warp(RendezvousRun what, uint32_t mine);
void meet_block();

template <class... Parameters>
constexpr std::size_t bytes_of = (sizeof(Parameters) + ... + std::size_t{0});

template <class Parameter>
void map_addresses_of(Parameter& parameter) {
  static_assert(std::is_trivially_copyable_v<Parameter>);
  constexpr std::size_t kBytes = sizeof(Parameter);
  if constexpr (alignof(Parameter) >= alignof(uint64_t))  // others have no addresses in them
    map_addresses(reinterpret_cast<uint64_t*>(&parameter), kBytes / sizeof(uint64_t));
}

}  // namespace emulated

using cudaError_t = int;
using cudaStream_t = void*;
inline constexpr cudaError_t cudaSuccess = 0;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  static_assert(emulated::bytes_of<Parameters...> <= emulated::kParameterBytes);
  std::tuple<Parameters...> copies(arguments...);
  std::apply([](auto&... each) { (emulated::map_addresses_of(each), ...); }, copies);
  return emulated::launch(config->stream, config->gridDim.x, config->blockDim.x,
                          [kernel, copies] { std::apply(kernel, copies); });
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }
inline const char* cudaGetErrorString(cudaError_t) { return "asked for by a test"; }

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  return std::swap(*mode, current), cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }

inline void __syncthreads() { emulated::meet_block(); }
inline unsigned __ballot_sync(unsigned, int mine) {
  const uint32_t* all = emulated::meet_warp(emulated::RendezvousRun::kBallot, mine != 0);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < emulated::kWarp; ++lane) bits |= all[lane] << lane;
  return bits;
}
inline uint32_t __shfl_sync(unsigned, uint32_t mine, unsigned lane) {
  return emulated::meet_warp(emulated::RendezvousRun::kShuffle, mine)[lane % emulated::kWarp];
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t mine, unsigned other) {
  return emulated::meet_warp(emulated::RendezvousRun::kShuffle, mine)[(threadIdx.x ^ other) % emulated::kWarp];
}
inline uint32_t __shfl_up_sync(unsigned, uint32_t mine, unsigned apart) {
  const unsigned lane = threadIdx.x % emulated::kWarp;
  return emulated::meet_warp(emulated::RendezvousRun::kShuffle, mine)[lane < apart ? lane : lane - apart];
}

inline uint32_t atomicAdd(uint32_t* at, uint32_t value) { return std::exchange(*at, *at + value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (unsigned i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
