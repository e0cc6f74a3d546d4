// ringdp's codecs over memory of the fake device: the host's, run when the stream gets there.
#include "codec.h"

#include <ATen/ops/from_blob.h>

#include <functional>
#include <vector>

#include "fake.h"
#include "torch/device/device_codec.h"

namespace fake_cuda {
namespace {

using ringdp::CodecId;
using ringdp::DeviceCodec;
namespace cuda = ringdp::cuda;

template <class T>
T* twin(T* address) {
  return Machine::here().twin(address);
}

cuda::Feedback twins(cuda::Feedback feedback) {
  feedback.both[0] = twin(feedback.both[0]);
  feedback.both[1] = twin(feedback.both[1]);
  feedback.which = twin(feedback.which);
  return feedback;
}

void on(const c10::Stream& stream, std::function<void()> work) { Machine::here().queue(stream.id(), std::move(work)); }

const c10::Stream& host_stream() {
  static const c10::Stream stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU));
  return stream;
}

class FakeCodec final : public DeviceCodec {
 public:
  explicit FakeCodec(const DeviceCodec& host) : host_(host) {}

  void encode(CodecId codec, std::span<const cuda::EncodeRun> runs, float loss_scale, int32_t* non_finite,
              const c10::Stream& stream) const override {
    std::vector<cuda::EncodeRun> here(runs.begin(), runs.end());
    for (cuda::EncodeRun& it : here) {
      it.x = twin(it.x);
      it.code = twin(it.code);
      it.feedback = twins(it.feedback);
    }
    on(stream, [=, this, flag = twin(non_finite)] { host_.encode(codec, here, loss_scale, flag, host_stream()); });
  }

  void reduce_codes(CodecId codec, std::span<const cuda::ReduceRun> runs, int sources, int own, float divisor,
                    float loss_scale, int32_t* non_finite, const c10::Stream& stream) const override {
    std::vector<cuda::ReduceRun> here(runs.begin(), runs.end());
    for (cuda::ReduceRun& it : here) {
      it.x = twin(it.x);
      it.codes = twin(it.codes);
      it.code = twin(it.code);
      it.feedback = twins(it.feedback);
    }
    on(stream, [=, this, flag = twin(non_finite)] {
      host_.reduce_codes(codec, here, sources, own, divisor, loss_scale, flag, host_stream());
    });
  }

  void decode_set(CodecId codec, std::span<const cuda::DecodeRun> runs, int32_t* non_finite,
                  const c10::Stream& stream) const override {
    std::vector<cuda::DecodeRun> here(runs.begin(), runs.end());
    for (cuda::DecodeRun& it : here) {
      it.out = twin(it.out);
      it.code = twin(it.code);
    }
    on(stream, [=, this, flag = twin(non_finite)] { host_.decode_set(codec, here, flag, host_stream()); });
  }

  void commit(std::span<int32_t* const> which, const int32_t* non_finite, const c10::Stream& stream) const override {
    std::vector<int32_t*> here(which.begin(), which.end());
    for (int32_t*& it : here) it = twin(it);
    on(stream, [=, this, flag = twin(non_finite)] { host_.commit(here, flag, host_stream()); });
  }

  void find_non_finite(const at::Tensor& values, int32_t* found, const c10::Stream& stream) const override {
    const at::Tensor here = at::for_blob(twin(static_cast<std::byte*>(values.mutable_data_ptr())), values.sizes())
                                .options(at::TensorOptions().dtype(values.scalar_type()))
                                .target_device(at::kCPU)
                                .make_tensor();
    on(stream, [=, this, flag = twin(found)] { host_.find_non_finite(here, flag, host_stream()); });
  }

 private:
  const DeviceCodec& host_;
};

}  // namespace

uintptr_t codec_over(uintptr_t host) {
  return reinterpret_cast<uintptr_t>(
      static_cast<const DeviceCodec*>(new FakeCodec(*reinterpret_cast<const DeviceCodec*>(host))));
}

}  // namespace fake_cuda
