#include "codec/low_rank.h"

#include <limits>
#include <vector>

#include "kernels/kernels.h"

namespace ringdp::low_rank {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr std::size_t kLanes = 16;
constexpr std::size_t kTogether = 4;    // vectors of a factor in one sweep
constexpr std::size_t kRowsOfDots = 4;  // by kTogether vectors: as many sums as there are vector registers to spare
constexpr std::size_t kRowsOfSums = 4;

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

struct Loops {
  void (*project)(float*, float*, const float*, const float*, float, const float*, const Shape&);
  void (*project_back)(float*, const float*, const float*, const Shape&);
  void (*expand)(float*, float*, float, const float*, const float*, const Shape&);
  void (*orthonormalise)(float*, std::size_t, std::size_t, double*);
};

namespace scalar {
#define RINGDP_LOW_RANK_TARGET
#include "codec/low_rank_loops.inc"
}  // namespace scalar

#if defined(__x86_64__)

namespace avx2 {
#define RINGDP_LOW_RANK_TARGET RINGDP_TARGET_AVX2
#include "codec/low_rank_loops.inc"
}  // namespace avx2

namespace avx512 {
#define RINGDP_LOW_RANK_TARGET RINGDP_TARGET_AVX512
#include "codec/low_rank_loops.inc"
}  // namespace avx512

#endif

const Loops& loops() {
#if defined(__x86_64__)
  if (current_isa() == Isa::kAvx512) return avx512::kLoops;
  if (current_isa() == Isa::kAvx2) return avx2::kLoops;
#endif
  return scalar::kLoops;
}

}  // namespace

void project(float* left, float* v, const float* x, const float* residual, float factor, const float* right,
             const Shape& shape) {
  loops().project(left, v, x, residual, factor, right, shape);
}

void project_back(float* right, const float* v, const float* left, const Shape& shape) {
  loops().project_back(right, v, left, shape);
}

void expand(float* matrix, float* kept, float factor, const float* left, const float* right, const Shape& shape) {
  loops().expand(matrix, kept, factor, left, right, shape);
}

void orthonormalise(float* vectors, std::size_t count, std::size_t rank) {
  std::vector<double> scratch(rank * count + count + 1);
  loops().orthonormalise(vectors, count, rank, scratch.data());
}

}  // namespace ringdp::low_rank
