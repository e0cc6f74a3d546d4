#include "torch/device/native_stream.h"

#include "base/error.h"

namespace ringdp {

void* native_stream(c10::Stream) {
  throw Error(
      ErrorKind::kState,
      "this build of ringdp has no CUDA and was given a CUDA stream: build it again where torch has CUDA and nvcc "
      "is there (docs/how-to/gpu.md)");
}

bool records_cuda_graph(c10::Stream) { return false; }

BesideCudaGraphs::BesideCudaGraphs() : mode_(0) {}

BesideCudaGraphs::~BesideCudaGraphs() = default;

}  // namespace ringdp
