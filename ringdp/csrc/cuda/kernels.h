// The CUDA kernels, as the torch side calls them: each call queues kernels on a stream and returns. This header needs
// no CUDA header; without CUDA, absent.cpp takes its place (available() is false, everything else throws
// Error(kState)). Pointers are to device memory unless said otherwise. Same bits as the codecs of codec/codec.h,
// whichever device. Any thread; the current device must be the stream's. Throws Error(kSystem) with CUDA's text if a
// launch fails, Error(kValue) for invalid arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.h"

namespace ringdp::cuda {

using Stream = void*;  // cudaStream_t

bool available();  // this build has kernels

// Error feedback of one run, elements [0, count): the residual is in both[*which], and the new one goes to both[1 -
// *which]; so the host need not know whether the last step counted. All null: no error feedback.
struct Feedback {
  float* both[2] = {nullptr, nullptr};
  const int32_t* which = nullptr;  // 0 or 1
};

struct EncodeRun {
  const float* x = nullptr;   // aligned to 4
  std::byte* code = nullptr;  // encoded_bytes(count)
  std::size_t count = 0;
  Feedback feedback;
};

struct DecodeRun {
  float* out = nullptr;
  const std::byte* code = nullptr;
  std::size_t count = 0;
};

// The owner's part of a compressed all-reduce: v = (Σ in rank order of decode(code of each source), x at `own`'s
// place) / divisor, code = encode(v), with feedback as in EncodeRun. Source s (of `sources` ranks) has its code at
// codes + s·stride; that of `own` is not read.
struct ReduceRun {
  const float* x = nullptr;
  const std::byte* codes = nullptr;
  std::size_t stride = 0;
  std::byte* code = nullptr;
  std::size_t count = 0;
  Feedback feedback;
};

// Each sets *non_finite to 1 (an int32 on the device, may be null; never reset) where a block it encodes or decodes is
// not finite. `loss_scale` is a power of two, as in Codec::compress_with_feedback. Any number of runs, also none.
// Fastest where floats are aligned to 16 and a code's plane of codes to its unit (codes of casts to 8; others, behind
// the scales, to 4).
void encode(CodecId codec, std::span<const EncodeRun> runs, float loss_scale, int32_t* non_finite, Stream stream);
void decode_set(CodecId codec, std::span<const DecodeRun> runs, int32_t* non_finite, Stream stream);
void reduce_codes(CodecId codec, std::span<const ReduceRun> runs, int sources, int own, float divisor, float loss_scale,
                  int32_t* non_finite, Stream stream);

// Sets *found to 1 where one of them is an infinity or a NaN. `dtype`: float16, bfloat16, float32 or float64.
void find_non_finite(const void* values, std::size_t count, DType dtype, int32_t* found, Stream stream);

// Elements but those with |x| < threshold (so NaNs are in), in ascending order of index: index[i], value[i]. *selected
// becomes how many there are in all; those beyond `capacity` are left out. `scratch`: select_scratch_bytes(count)
// bytes (about count / 8), aligned to 4. At most 2^32 - 1 elements.
std::size_t select_scratch_bytes(std::size_t count);
void select(const float* x, std::size_t count, float threshold, uint32_t* index, float* value, std::size_t capacity,
            uint32_t* selected, void* scratch, Stream stream);

// *which = 1 - *which for each of them, unless *non_finite (which may be null): publishes the residuals written last.
void commit(std::span<int32_t* const> which, const int32_t* non_finite, Stream stream);

}  // namespace ringdp::cuda
