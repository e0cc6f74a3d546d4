// The second half of encode and reduce_codes: values become codes, and the codes' error becomes the new residual.
// Called by all threads of a warp.
#pragma once

#include "cuda/codes.cuh"

namespace ringdp::cuda {

// Feedback as a warp needs it, read once.
struct Residuals {
  const float* before = nullptr;
  float* after = nullptr;
  float loss_scale = 1;
  float inverse = 1;

  __device__ Residuals(const Feedback& feedback, float by) : loss_scale(by), inverse(1.0f / by) {
    if (feedback.which == nullptr) return;
    const bool second = *feedback.which != 0;
    before = second ? feedback.both[1] : feedback.both[0];
    after = second ? feedback.both[0] : feedback.both[1];
  }
};

// v += loss_scale · residual for each step; `left` keeps the residual.
template <class Codes, Access kAccess, int kSteps>
__device__ inline void add_residual(float (&v)[kSteps][kShare], float (&left)[kSteps][kShare],
                                    const Residuals& residuals, std::size_t begin, std::size_t count, unsigned lane) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    load_share<Codes::kGroup, kAccess>(left[s], residuals.before, begin + s * kStep, count, lane);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < kShare; ++i) v[s][i] = kernels::Sum::apply(v[s][i], residuals.loss_scale * left[s][i]);
}

// Codes v; true where all of it was finite.
template <class Codes, Access kAccess, bool kFeedback, int kSteps, int kKept>
__device__ inline bool encode_steps(std::byte* code, const float (&v)[kSteps][kShare], float (&left)[kKept][kShare],
                                    const Residuals& residuals, std::size_t begin, std::size_t count, unsigned lane) {
  bool finite = true;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const typename Codes::Code coded = Codes::encode(v[s], lane);
    Codes::template store<kAccess>(code, coded, begin, s, count, lane);
    finite &= Codes::finite(coded);
    if constexpr (kFeedback) {
      float back[kShare];
      Codes::decode(back, coded);
#pragma unroll
      for (int i = 0; i < kShare; ++i)
        left[s][i] = Codes::finite(coded, i) ? (v[s][i] - back[i]) * residuals.inverse : left[s][i];
      store_share<Codes::kGroup, kAccess>(residuals.after, left[s], begin + s * kStep, count, lane);
    }
  }
  return finite;
}

}  // namespace ringdp::cuda
