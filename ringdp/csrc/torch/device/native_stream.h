// Properties of a CUDA stream to which torch gives no device-independent access. Implemented in cuda/native_stream.cpp
// for a torch with CUDA, in no_cuda/native_stream.cpp for one without. Any thread.
#pragma once

#include <c10/core/Stream.h>

namespace ringdp {

// The cudaStream_t, for kernels that torch does not launch. Throws Error(kState) in a build without CUDA.
void* native_stream(c10::Stream stream);

// Whether the stream records a CUDA graph, so that it must not be waited for or queried. False for other devices.
bool records_cuda_graph(c10::Stream stream);

// While one exists, this thread may query streams although another thread records a CUDA graph, which by default
// forbids it to all threads of the process. Not for the recording thread.
class BesideCudaGraphs {
 public:
  BesideCudaGraphs();
  ~BesideCudaGraphs();
  BesideCudaGraphs(const BesideCudaGraphs&) = delete;
  BesideCudaGraphs& operator=(const BesideCudaGraphs&) = delete;

 private:
  int mode_;  // cudaStreamCaptureMode, as it was
};

}  // namespace ringdp
