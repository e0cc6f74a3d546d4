// Marks of the functions that define element arithmetic: nvcc compiles them for the device too, so that CPU and GPU
// share one definition of the bits. Stateless, any thread.
#pragma once

#if defined(__CUDACC__)
#define RINGDP_HOST_DEVICE __host__ __device__
#else
#define RINGDP_HOST_DEVICE
#endif
#define RINGDP_ALWAYS_INLINE RINGDP_HOST_DEVICE inline __attribute__((always_inline))

namespace ringdp {

// std::bit_cast, which is a host function to nvcc.
template <class To, class From>
RINGDP_ALWAYS_INLINE constexpr To bits_as(From from) {
  return __builtin_bit_cast(To, from);
}

}  // namespace ringdp
