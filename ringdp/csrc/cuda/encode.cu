// encode: reads elements (and residuals), writes codes (and residuals).
#include "cuda/encoding.cuh"
#include "cuda/runs.cuh"

namespace ringdp::cuda {
namespace {

struct EncodePart {
  EncodeRun run;
  std::size_t count;
  Access access;
};

template <bool kFeedback>
inline constexpr int kEncodeSteps = kFeedback ? 2 : 4;  // as many registers either way

template <class Codes, bool kFeedback>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const __grid_constant__ RunTable<EncodePart> table, float loss_scale, int32_t* non_finite) {
  constexpr int kSteps = kEncodeSteps<kFeedback>;
  const uint32_t which = table.run_of(blockIdx.x);
  const EncodePart& it = table.runs[which];
  const std::size_t count = it.count;
  const WarpPart part = warp_part<kSteps>(blockIdx.x - table.first[which], count);
  const Residuals residuals(it.run.feedback, loss_scale);
  bool finite = true;
  for_steps<kSteps>(part, count, it.access, [&]<Access kAccess, int kAtOnce>(std::size_t begin) {
    float v[kAtOnce][kShare], left[kFeedback ? kAtOnce : 1][kShare];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s)
      load_share<Codes::kGroup, kAccess>(v[s], it.run.x, begin + s * kStep, count, part.lane);
    if constexpr (kFeedback) add_residual<Codes, kAccess>(v, left, residuals, begin, count, part.lane);
    finite &= encode_steps<Codes, kAccess, kFeedback>(it.run.code, v, left, residuals, begin, count, part.lane);
  });
  if (!finite && non_finite != nullptr) *non_finite = 1;
}

template <class Codes, bool kFeedback>
void encode_all(std::span<const EncodeRun> runs, float loss_scale, int32_t* non_finite, Stream stream) {
  RunTables<EncodePart> tables(kTile<kEncodeSteps<kFeedback>>);
  const auto start = [&](const RunTable<EncodePart>& table, uint32_t tiles) {
    launch("encode", stream, tiles, encode_kernel<Codes, kFeedback>, table, loss_scale, non_finite);
  };
  for (const EncodeRun& run : runs) {
    if ((run.feedback.which != nullptr) != kFeedback) continue;
    const Feedback& feedback = run.feedback;
    tables.add({run, run.count, access_of<Codes>({run.x, feedback.both[0], feedback.both[1]}, {run.code}, run.count)},
               start);
  }
  tables.flush(start);
}

}  // namespace

void encode(CodecId codec, std::span<const EncodeRun> runs, float loss_scale, int32_t* non_finite, Stream stream) {
  with_codes(codec, [&]<class Codes>(Codes) {
    encode_all<Codes, false>(runs, loss_scale, non_finite, stream);
    encode_all<Codes, true>(runs, loss_scale, non_finite, stream);
  });
}

}  // namespace ringdp::cuda
