// Instead of the kernels, where ringdp is built without CUDA.
#include "base/error.h"
#include "cuda/kernels.h"

namespace ringdp::cuda {
namespace {

[[noreturn]] void refuse() {
  throw Error(
      ErrorKind::kState,
      "this build of ringdp has no CUDA kernels: build it where torch has CUDA and nvcc of the same CUDA version is "
      "on PATH");
}

}  // namespace

bool available() { return false; }

void encode(CodecId, std::span<const EncodeRun>, float, int32_t*, Stream) { refuse(); }
void decode_set(CodecId, std::span<const DecodeRun>, int32_t*, Stream) { refuse(); }
void reduce_codes(CodecId, std::span<const ReduceRun>, int, int, float, float, int32_t*, Stream) { refuse(); }
void find_non_finite(const void*, std::size_t, DType, int32_t*, Stream) { refuse(); }
std::size_t select_scratch_bytes(std::size_t) { refuse(); }
void select(const float*, std::size_t, float, uint32_t*, float*, std::size_t, uint32_t*, void*, Stream) { refuse(); }
void commit(std::span<int32_t* const>, const int32_t*, Stream) { refuse(); }

}  // namespace ringdp::cuda
