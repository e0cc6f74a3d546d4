// In place of torch's header, which is written for a CUDA that is there.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include "cuda_runtime.h"

namespace c10::cuda {

class CUDAStream {
 public:
  explicit CUDAStream(c10::Stream stream) : stream_(stream) {
    TORCH_CHECK(stream.device_type() == c10::DeviceType::CUDA, stream, " is not a stream of CUDA");
  }
  // Its number, of which 0 is the default stream's here and there.
  cudaStream_t stream() const { return reinterpret_cast<cudaStream_t>(stream_.id()); }

 private:
  c10::Stream stream_;
};

}  // namespace c10::cuda
