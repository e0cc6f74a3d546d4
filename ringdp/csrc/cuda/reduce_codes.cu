// reduce_codes: decodes the codes of all sources, adds them in order of rank, divides and encodes again, in one pass.
#include <algorithm>
#include <cmath>

#include "cuda/encoding.cuh"
#include "cuda/runs.cuh"

namespace ringdp::cuda {
namespace {

struct ReducePart {
  ReduceRun run;
  std::size_t count;
  Access access;
};

struct ReduceArguments {
  int sources;
  int own;
  float divisor;
  float inverse;  // of a divisor that is a power of two, whose product is the same to the bit; 0 otherwise
  float loss_scale;
};

constexpr int kReduceSteps = 2;
constexpr int kResident = 4;  // blocks of threads on a processor, so that enough loads are under way

// v = the sum in order of the sources, as it is where there is one source only. The code of the next source is under
// way while one is added.
template <class Codes, Access kAccess, int kSteps>
__device__ inline void add_sources(float (&v)[kSteps][kShare], const ReduceRun& run, const ReduceArguments& by,
                                   std::size_t begin, std::size_t count, unsigned lane) {
  typename Codes::Code ahead[kSteps];
  const auto fetch = [&](int source) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      ahead[s] = Codes::template load<kAccess>(run.codes + static_cast<std::size_t>(source) * run.stride,
                                               begin + s * kStep, count, lane);
  };
  const int first = by.own == 0 ? 1 : 0;
  if (first < by.sources) fetch(first);
#pragma unroll 1
  for (int source = 0; source < by.sources; ++source) {
    float term[kSteps][kShare];
    if (source == by.own) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        load_share<Codes::kGroup, kAccess>(term[s], run.x, begin + s * kStep, count, lane);
    } else {
      typename Codes::Code code[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) code[s] = ahead[s];
      const int next = source + 1 == by.own ? source + 2 : source + 1;
      if (next < by.sources) fetch(next);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) Codes::decode(term[s], code[s]);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < kShare; ++i) v[s][i] = source == 0 ? term[s][i] : v[s][i] + term[s][i];
  }
}

template <class Codes, bool kFeedback>
__global__ void __launch_bounds__(kThreads, kResident)
    reduce_kernel(const __grid_constant__ RunTable<ReducePart> table, ReduceArguments by, int32_t* non_finite) {
  const uint32_t which = table.run_of(blockIdx.x);
  const ReducePart& it = table.runs[which];
  const std::size_t count = it.count;
  const WarpPart part = warp_part<kReduceSteps>(blockIdx.x - table.first[which], count);
  const Residuals residuals(it.run.feedback, by.loss_scale);
  bool finite = true;
  for_steps<kReduceSteps>(part, count, it.access, [&]<Access kAccess, int kAtOnce>(std::size_t begin) {
    float v[kAtOnce][kShare], left[kFeedback ? kAtOnce : 1][kShare];
    add_sources<Codes, kAccess>(v, it.run, by, begin, count, part.lane);
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s)
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        const float mean = kernels::one_nan(by.inverse == 0.0f ? v[s][i] / by.divisor : v[s][i] * by.inverse);
        // Codes beyond the end of the run may decode to any value.
        const bool inside =
            kAccess != Access::kElements || begin + s * kStep + element_of<Codes::kGroup>(part.lane, i) < count;
        v[s][i] = inside ? mean : 0.0f;
      }
    if constexpr (kFeedback) add_residual<Codes, kAccess>(v, left, residuals, begin, count, part.lane);
    finite &= encode_steps<Codes, kAccess, kFeedback>(it.run.code, v, left, residuals, begin, count, part.lane);
  });
  if (!finite && non_finite != nullptr) *non_finite = 1;
}

template <class Codes, bool kFeedback>
void reduce_all(std::span<const ReduceRun> runs, const ReduceArguments& by, int32_t* non_finite, Stream stream) {
  RunTables<ReducePart> tables(kTile<kReduceSteps>);
  const auto start = [&](const RunTable<ReducePart>& table, uint32_t tiles) {
    launch("reduce_codes", stream, tiles, reduce_kernel<Codes, kFeedback>, table, by, non_finite);
  };
  for (const ReduceRun& run : runs) {
    if ((run.feedback.which != nullptr) != kFeedback) continue;
    const Feedback& feedback = run.feedback;
    // All sources are aligned as the first two are.
    const Access access = access_of<Codes>({run.x, feedback.both[0], feedback.both[1]},
                                           {run.code, run.codes, run.codes + run.stride}, run.count);
    tables.add({run, run.count, access}, start);
  }
  tables.flush(start);
}

}  // namespace

void reduce_codes(CodecId codec, std::span<const ReduceRun> runs, int sources, int own, float divisor, float loss_scale,
                  int32_t* non_finite, Stream stream) {
  if (own < 0 || own >= sources)
    throw Error(ErrorKind::kValue,
                "cuda: reduce_codes: own is " + std::to_string(own) + " of " + std::to_string(sources) + " sources");
  int exponent;
  const float by_it = std::max(divisor, 1.0f);
  const float inverse = std::frexp(by_it, &exponent) == 0.5f ? 1.0f / by_it : 0.0f;
  const ReduceArguments by{sources, own, by_it, inverse, loss_scale};
  with_codes(codec, [&]<class Codes>(Codes) {
    reduce_all<Codes, false>(runs, by, non_finite, stream);
    reduce_all<Codes, true>(runs, by, non_finite, stream);
  });
}

}  // namespace ringdp::cuda
