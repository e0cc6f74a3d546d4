#include "torch/device/device_codec.h"

#include <algorithm>
#include <vector>

#include "codec/codec.h"
#include "kernels/float_mode.h"
#include "kernels/kernels.h"
#include "torch/backend/buffers.h"

namespace ringdp {
namespace {

void note(Encoded seen, int32_t* non_finite) {
  if (seen == Encoded::kNonFinite && non_finite != nullptr) *non_finite = 1;
}

Encoded compress(const Codec& codec, std::byte* code, const float* values, std::size_t count,
                 const cuda::Feedback& feedback, float loss_scale) {
  if (feedback.which == nullptr) return codec.compress(code, values, count);
  const int32_t now = *feedback.which;
  return codec.compress_with_feedback(code, values, feedback.both[now], feedback.both[1 - now], loss_scale, count);
}

// Torch's threads may flush denormals; the codecs' bits are those of the default mode.
class HostCodec final : public DeviceCodec {
 public:
  void encode(CodecId id, std::span<const cuda::EncodeRun> runs, float loss_scale, int32_t* non_finite,
              const c10::Stream&) const override {
    const FloatModeScope float_mode;
    for (const cuda::EncodeRun& run : runs)
      note(compress(codec(id), run.code, run.x, run.count, run.feedback, loss_scale), non_finite);
  }

  void reduce_codes(CodecId id, std::span<const cuda::ReduceRun> runs, int sources, int own, float divisor,
                    float loss_scale, int32_t* non_finite, const c10::Stream&) const override {
    const FloatModeScope float_mode;
    const Codec& it = codec(id);
    const ReduceKernels& kernels = reduce_kernels(DType::kFloat32, ReduceOp::kAvg);
    std::vector<float> sum;
    for (const cuda::ReduceRun& run : runs) {
      sum.resize(std::max(sum.size(), run.count));
      for (int source = 0; source < sources; ++source) {
        const std::byte* code = run.codes + static_cast<std::size_t>(source) * run.stride;
        if (source == 0 && own == 0)
          std::copy_n(run.x, run.count, sum.data());
        else if (source == 0)
          it.decode_set(sum.data(), code, run.count);
        else if (source == own)
          kernels.combine(sum.data(), sum.data(), run.x, run.count);
        else
          it.decode_add(sum.data(), code, run.count);
      }
      if (divisor > 1) kernels.divide(sum.data(), static_cast<std::size_t>(divisor), run.count);
      note(compress(it, run.code, sum.data(), run.count, run.feedback, loss_scale), non_finite);
    }
  }

  void decode_set(CodecId id, std::span<const cuda::DecodeRun> runs, int32_t* non_finite,
                  const c10::Stream&) const override {
    const FloatModeScope float_mode;
    const Codec& it = codec(id);
    for (const cuda::DecodeRun& run : runs) {
      it.decode_set(run.out, run.code, run.count);
      note(inspect(it, run.code, run.out, run.count), non_finite);
    }
  }

  void commit(std::span<int32_t* const> which, const int32_t* non_finite, const c10::Stream&) const override {
    if (non_finite != nullptr && *non_finite != 0) return;
    for (int32_t* one : which) *one = 1 - *one;
  }

  void find_non_finite(const at::Tensor& values, int32_t* found, const c10::Stream&) const override {
    const auto count = static_cast<std::size_t>(values.numel());
    const FirstNonFinite find = first_non_finite(dtype_of(values, "a bucket"));
    if (find != nullptr && find(values.const_data_ptr(), count) < count) *found = 1;
  }
};

}  // namespace

const DeviceCodec* device_codec(c10::DeviceType device) {
  static const HostCodec host;
  if (device == c10::DeviceType::CPU) return &host;
  return device == c10::DeviceType::CUDA ? cuda_codec() : nullptr;
}

}  // namespace ringdp
