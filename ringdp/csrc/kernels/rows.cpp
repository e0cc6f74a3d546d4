#include "kernels/rows.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/half.h"
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringdp::rows {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kTile = 64;
constexpr std::size_t kAhead = 8;  // rows are prefetched so many rows ahead
constexpr std::size_t kCacheLine = 64;
constexpr uint32_t kInfiniteBits = 0x7f800000u;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargestCode = 127.0f;
constexpr float kLeastScale = std::numeric_limits<float>::min();
constexpr float kRounder = 12582912.0f;

template <class T>
inline void fetch(const T* row, std::size_t dim) {
  const auto* bytes = reinterpret_cast<const char*>(row);
  for (std::size_t i = 0; i < dim * sizeof(T); i += kCacheLine) __builtin_prefetch(bytes + i);
}

inline std::pair<std::size_t, std::size_t> range(const Bags& bags, std::size_t b) {
  return {static_cast<std::size_t>(bags.begins[b]),
          b + 1 < bags.begins.size() ? static_cast<std::size_t>(bags.begins[b + 1]) : bags.which.size()};
}

template <class T>
struct Numbers {
  explicit Numbers(const Update& how)
      : rule(how.rule),
        rate(static_cast<T>(how.rate)),
        eps(static_cast<T>(how.eps)),
        beta2(static_cast<T>(how.beta2)),
        rest1(static_cast<T>(1 - how.beta1)),
        rest2(static_cast<T>(1 - how.beta2)) {}
  Rule rule;
  T rate;
  T eps;
  T beta2;
  T rest1;
  T rest2;
};

template <class T>
struct Loops {
  void (*gather)(std::byte*, const T*, std::span<const Index>, std::size_t, Wire);
  void (*encode)(std::byte*, const T*, std::size_t, std::size_t, Wire);
  void (*decode)(T*, const std::byte*, std::size_t, std::size_t, Wire);
  void (*sum_bags)(T*, const T*, const Bags&, std::size_t);
  void (*spread_bags)(T*, const T*, const Bags&, std::size_t);
  void (*add_encoded)(T*, const std::byte*, std::span<const Index>, std::size_t, Wire);
  void (*update)(const Numbers<T>&, T*, Memory<T>, std::span<const Index>, const T*, std::size_t);
};

// Compilers do not vectorise std::sqrt where it may set errno, so the vector versions use intrinsics.
namespace scalar {
template <class T>
inline void roots(T* x, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) x[i] = std::sqrt(x[i]);
}
#define RINGDP_ROWS_TARGET
#include "kernels/rows_loops.inc"
#undef RINGDP_ROWS_TARGET
#undef RINGDP_ROWS_INLINE
}  // namespace scalar

#if defined(__x86_64__)

namespace avx2 {
#define RINGDP_ROWS_TARGET RINGDP_TARGET_AVX2
RINGDP_ROWS_TARGET inline void roots(float* x, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(x + i, _mm256_sqrt_ps(_mm256_loadu_ps(x + i)));
  for (; i < count; ++i) x[i] = std::sqrt(x[i]);
}
RINGDP_ROWS_TARGET inline void roots(double* x, std::size_t count) {
  std::size_t i = 0;
  for (; i + 4 <= count; i += 4) _mm256_storeu_pd(x + i, _mm256_sqrt_pd(_mm256_loadu_pd(x + i)));
  for (; i < count; ++i) x[i] = std::sqrt(x[i]);
}
#include "kernels/rows_loops.inc"
#undef RINGDP_ROWS_TARGET
#undef RINGDP_ROWS_INLINE
}  // namespace avx2

namespace avx512 {
using avx2::roots;
#define RINGDP_ROWS_TARGET RINGDP_TARGET_AVX512
#include "kernels/rows_loops.inc"
#undef RINGDP_ROWS_TARGET
#undef RINGDP_ROWS_INLINE
}  // namespace avx512

#endif

template <class T>
const Loops<T>& loops() {
#if defined(__x86_64__)
  if (current_isa() == Isa::kAvx512) return avx512::kLoops<T>;
  if (current_isa() == Isa::kAvx2) return avx2::kLoops<T>;
#endif
  return scalar::kLoops<T>;
}

}  // namespace

std::size_t encoded_bytes(Wire wire, std::size_t element_bytes, std::size_t dim) {
  switch (wire) {
    case Wire::kExact:
      return element_bytes * dim;
    case Wire::kBfloat16:
      return sizeof(uint16_t) * dim;
    case Wire::kInt8:
      return dim + sizeof(float);
  }
  return 0;
}

template <class T>
void gather(std::byte* out, const T* table, std::span<const Index> which, std::size_t dim, Wire wire) {
  loops<T>().gather(out, table, which, dim, wire);
}

template <class T>
void encode(std::byte* out, const T* rows, std::size_t count, std::size_t dim, Wire wire) {
  loops<T>().encode(out, rows, count, dim, wire);
}

template <class T>
void decode(T* out, const std::byte* rows, std::size_t count, std::size_t dim, Wire wire) {
  loops<T>().decode(out, rows, count, dim, wire);
}

template <class T>
void sum_bags(T* out, const T* rows, const Bags& bags, std::size_t dim) {
  loops<T>().sum_bags(out, rows, bags, dim);
}

template <class T>
void spread_bags(T* sums, const T* gradients, const Bags& bags, std::size_t dim) {
  loops<T>().spread_bags(sums, gradients, bags, dim);
}

template <class T>
void add_encoded(T* sums, const std::byte* rows, std::span<const Index> to, std::size_t dim, Wire wire) {
  loops<T>().add_encoded(sums, rows, to, dim, wire);
}

template <class T>
void update(const Update& how, T* table, Memory<T> memory, std::span<const Index> which, const T* sums,
            std::size_t dim) {
  loops<T>().update(Numbers<T>(how), table, memory, which, sums, dim);
}

#define RINGDP_ROWS_OF(T)                                                                        \
  template void gather<T>(std::byte*, const T*, std::span<const Index>, std::size_t, Wire);      \
  template void encode<T>(std::byte*, const T*, std::size_t, std::size_t, Wire);                 \
  template void decode<T>(T*, const std::byte*, std::size_t, std::size_t, Wire);                 \
  template void sum_bags<T>(T*, const T*, const Bags&, std::size_t);                             \
  template void spread_bags<T>(T*, const T*, const Bags&, std::size_t);                          \
  template void add_encoded<T>(T*, const std::byte*, std::span<const Index>, std::size_t, Wire); \
  template void update<T>(const Update&, T*, Memory<T>, std::span<const Index>, const T*, std::size_t);
RINGDP_ROWS_OF(float)
RINGDP_ROWS_OF(double)

}  // namespace ringdp::rows
