// The loops for AVX2 with F16C: 8 floats at a time.
#include "kernels/kernels.h"
#include "kernels/table.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define RINGDP_KERNEL_TARGET RINGDP_TARGET_AVX2
#define RINGDP_KERNEL_FLOAT16_VECTOR

namespace ringdp::kernels {
namespace {

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

struct WidenFloat16 {
  RINGDP_KERNEL_TARGET static void run(float* dst, const uint16_t* src, std::size_t count) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
    for (; i < count; ++i) dst[i] = half_to_float(src[i]);
  }
};

struct NarrowFloat16 {
  RINGDP_KERNEL_TARGET static void run(uint16_t* dst, const float* src, std::size_t count) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), kNearest);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), halves);
    }
    for (; i < count; ++i) dst[i] = float_to_half(src[i]);
  }
};

#include "kernels/loops.inc"

}  // namespace

const KernelTable* avx2_table() { return &kTable; }

}  // namespace ringdp::kernels

#else

namespace ringdp::kernels {
const KernelTable* avx2_table() { return nullptr; }
}  // namespace ringdp::kernels

#endif
