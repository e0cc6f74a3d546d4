#include "torch/device/native_stream.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

namespace ringdp {

void* native_stream(c10::Stream stream) { return c10::cuda::CUDAStream(stream).stream(); }

bool records_cuda_graph(c10::Stream stream) {
  if (stream.device_type() != c10::DeviceType::CUDA) return false;
  cudaStreamCaptureStatus status{};
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::CUDAStream(stream).stream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

BesideCudaGraphs::BesideCudaGraphs() {
  auto mode = cudaStreamCaptureModeThreadLocal;
  C10_CUDA_CHECK_WARN(cudaThreadExchangeStreamCaptureMode(&mode));
  mode_ = static_cast<int>(mode);
}

BesideCudaGraphs::~BesideCudaGraphs() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_);
  C10_CUDA_CHECK_WARN(cudaThreadExchangeStreamCaptureMode(&mode));
}

}  // namespace ringdp
