#include "torch/device/device_codec.h"

#include "torch/backend/buffers.h"
#include "torch/device/native_stream.h"

namespace ringdp {
namespace {

class CudaCodec final : public DeviceCodec {
 public:
  void encode(CodecId codec, std::span<const cuda::EncodeRun> runs, float loss_scale, int32_t* non_finite,
              const c10::Stream& stream) const override {
    cuda::encode(codec, runs, loss_scale, non_finite, native_stream(stream));
  }
  void reduce_codes(CodecId codec, std::span<const cuda::ReduceRun> runs, int sources, int own, float divisor,
                    float loss_scale, int32_t* non_finite, const c10::Stream& stream) const override {
    cuda::reduce_codes(codec, runs, sources, own, divisor, loss_scale, non_finite, native_stream(stream));
  }
  void decode_set(CodecId codec, std::span<const cuda::DecodeRun> runs, int32_t* non_finite,
                  const c10::Stream& stream) const override {
    cuda::decode_set(codec, runs, non_finite, native_stream(stream));
  }
  void commit(std::span<int32_t* const> which, const int32_t* non_finite, const c10::Stream& stream) const override {
    cuda::commit(which, non_finite, native_stream(stream));
  }
  void find_non_finite(const at::Tensor& values, int32_t* found, const c10::Stream& stream) const override {
    cuda::find_non_finite(values.const_data_ptr(), static_cast<std::size_t>(values.numel()),
                          element_type(values.scalar_type(), "a bucket"), found, native_stream(stream));
  }
};

}  // namespace

const DeviceCodec* cuda_codec() {
  static const CudaCodec codec;
  return cuda::available() ? &codec : nullptr;
}

}  // namespace ringdp
