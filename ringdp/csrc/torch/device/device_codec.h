// DeviceCodec: the codecs of codec/codec.h over memory of one kind of device, many runs per call. On a device a call
// queues work on a stream and returns; on the CPU it is done when it returns, and the stream is not used. Same bits
// everywhere. Stateless, any thread; the stream's device is the current one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <span>

#include "cuda/kernels.h"

namespace ringdp {

class DeviceCodec {
 public:
  virtual ~DeviceCodec() = default;

  // Contracts, also of *non_finite: see cuda/kernels.h.
  virtual void encode(CodecId codec, std::span<const cuda::EncodeRun> runs, float loss_scale, int32_t* non_finite,
                      const c10::Stream& stream) const = 0;
  virtual void reduce_codes(CodecId codec, std::span<const cuda::ReduceRun> runs, int sources, int own, float divisor,
                            float loss_scale, int32_t* non_finite, const c10::Stream& stream) const = 0;
  virtual void decode_set(CodecId codec, std::span<const cuda::DecodeRun> runs, int32_t* non_finite,
                          const c10::Stream& stream) const = 0;
  virtual void commit(std::span<int32_t* const> which, const int32_t* non_finite, const c10::Stream& stream) const = 0;
  // `values` is contiguous and of a real floating type.
  virtual void find_non_finite(const at::Tensor& values, int32_t* found, const c10::Stream& stream) const = 0;
};

// Null if this build has no kernels for that device.
const DeviceCodec* device_codec(c10::DeviceType device);

// For CUDA devices: defined in torch/device/cuda/ or torch/device/no_cuda/, depending on the build.
const DeviceCodec* cuda_codec();

}  // namespace ringdp
