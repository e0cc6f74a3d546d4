// The loops for AVX-512 (F, BW, DQ, VL): 16 floats at a time.
#include "kernels/kernels.h"
#include "kernels/table.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define RINGDP_KERNEL_TARGET RINGDP_TARGET_AVX512
#define RINGDP_KERNEL_FLOAT16_VECTOR

namespace ringdp::kernels {
namespace {

// gcc 12 warns about its own unmasked conversions (their unused operand is uninitialised); these compile to the same.
constexpr __mmask16 kAll = 0xffff;
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

struct WidenFloat16 {
  RINGDP_KERNEL_TARGET static void run(float* dst, const uint16_t* src, std::size_t count) {
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16)
      _mm512_storeu_ps(dst + i,
                       _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i))));
    for (; i < count; ++i) dst[i] = half_to_float(src[i]);
  }
};

struct NarrowFloat16 {
  RINGDP_KERNEL_TARGET static void run(uint16_t* dst, const float* src, std::size_t count) {
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16) {
      const __m256i halves = _mm512_maskz_cvtps_ph(kAll, _mm512_loadu_ps(src + i), kNearest);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), halves);
    }
    for (; i < count; ++i) dst[i] = float_to_half(src[i]);
  }
};

#include "kernels/loops.inc"

}  // namespace

const KernelTable* avx512_table() { return &kTable; }

}  // namespace ringdp::kernels

#else

namespace ringdp::kernels {
const KernelTable* avx512_table() { return nullptr; }
}  // namespace ringdp::kernels

#endif
