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
constexpr int kTogether = 4;  // sources of which all is read before the first of them is added
constexpr int kResident = 2;  // blocks of threads on a processor: registers for what is under way

__device__ inline void add(float (&v)[kShare], const float (&term)[kShare]) {
#pragma unroll
  for (int i = 0; i < kShare; ++i) v[i] += term[i];
}

// v = the sum in order of the sources.
template <class Codes, Access kAccess, int kSteps>
__device__ inline void add_sources(float (&v)[kSteps][kShare], const ReduceRun& run, const ReduceArguments& by,
                                   std::size_t begin, std::size_t count, unsigned lane) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kShare; ++i) v[s][i] = -0.0f;  // plus any number is that number
  const std::byte* codes = run.codes;
#pragma unroll 1
  for (int first = 0; first < by.sources; first += kTogether) {
    const int own = by.own - first, sources = by.sources - first;
    float x[kSteps][kShare];
    if (own >= 0 && own < kTogether) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) load_share<Codes::kGroup, kAccess>(x[s], run.x, begin + s * kStep, count, lane);
    }
    typename Codes::Loaded loaded[kTogether][kSteps];
#pragma unroll
    for (int i = 0; i < kTogether; ++i, codes += run.stride)
      if (i < sources && i != own) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) loaded[i][s] = Codes::template load<kAccess>(codes, begin, s, count, lane);
      }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (i == own) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) add(v[s], x[s]);
      } else if (i < sources) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          float term[kShare];
          Codes::decode(term, Codes::taken(loaded[i][s], lane));
          add(v[s], term);
        }
      }
    }
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
        float mean = by.inverse == 0.0f ? v[s][i] / by.divisor : v[s][i] * by.inverse;
        if constexpr (Codes::kKeepsNans) mean = kernels::one_nan(mean);
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
