// encode: reads elements (and residuals), writes codes (and residuals). commit: publishes the residuals written last.
#include <algorithm>

#include "cuda/encoding.cuh"
#include "cuda/launch.cuh"
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

namespace {

constexpr std::size_t kAtOnce = 480;  // pointers in a kernel's parameters

struct Switches {
  int32_t* which[kAtOnce];
  unsigned count;
};

__global__ void __launch_bounds__(kThreads)
    commit_kernel(const __grid_constant__ Switches switches, const int32_t* non_finite) {
  if (non_finite != nullptr && *non_finite != 0) return;
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  if (i < switches.count) *switches.which[i] = 1 - *switches.which[i];
}

}  // namespace

void commit(std::span<int32_t* const> which, const int32_t* non_finite, Stream stream) {
  Switches switches{};
  for (std::size_t begin = 0; begin < which.size(); begin += kAtOnce) {
    const auto these = which.subspan(begin, std::min(kAtOnce, which.size() - begin));
    std::copy(these.begin(), these.end(), switches.which);
    switches.count = static_cast<unsigned>(these.size());
    launch("commit residuals", stream, tiles_of(these.size(), kThreads), commit_kernel, switches, non_finite);
  }
}

}  // namespace ringdp::cuda
