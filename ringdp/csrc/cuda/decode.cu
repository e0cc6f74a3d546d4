// decode_set: reads codes, writes elements.
#include "cuda/codes.cuh"
#include "cuda/runs.cuh"

namespace ringdp::cuda {
namespace {

struct DecodePart {
  DecodeRun run;
  std::size_t count;
  Access access;
};

constexpr int kDecodeSteps = 4;

template <class Codes>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const __grid_constant__ RunTable<DecodePart> table, int32_t* non_finite) {
  const uint32_t which = table.run_of(blockIdx.x);
  const DecodePart& it = table.runs[which];
  const std::size_t count = it.count;
  const WarpPart part = warp_part<kDecodeSteps>(blockIdx.x - table.first[which], count);
  const bool asked = non_finite != nullptr;
  bool finite = true;
  for_steps<kDecodeSteps>(part, count, it.access, [&]<Access kAccess, int kAtOnce>(std::size_t begin) {
    typename Codes::Loaded loaded[kAtOnce];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s)
      loaded[s] = Codes::template load<kAccess>(it.run.code, begin, s, count, part.lane);
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      const std::size_t at = begin + s * kStep;
      const typename Codes::Code code = Codes::taken(loaded[s], part.lane);
      float values[kShare];
      Codes::decode_marked(values, code);
      if (asked) finite &= Codes::decodes_finite(code, values, at, count, part.lane);
      store_share<Codes::kGroup, kAccess>(it.run.out, values, at, count, part.lane);
    }
  });
  if (!finite) *non_finite = 1;
}

}  // namespace

void decode_set(CodecId codec, std::span<const DecodeRun> runs, int32_t* non_finite, Stream stream) {
  with_codes(codec, [&]<class Codes>(Codes) {
    RunTables<DecodePart> tables(kTile<kDecodeSteps>);
    const auto start = [&](const RunTable<DecodePart>& table, uint32_t tiles) {
      launch("decode", stream, tiles, decode_kernel<Codes>, table, non_finite);
    };
    for (const DecodeRun& run : runs)
      tables.add({run, run.count, access_of<Codes>({run.out}, {run.code}, run.count)}, start);
    tables.flush(start);
  });
}

}  // namespace ringdp::cuda
