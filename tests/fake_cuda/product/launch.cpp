// Kernels of the product run on the streams of the fake device, on its memory.
#include "cuda_runtime.h"
#include "kernels/float_mode.h"
#include "machine.h"

namespace emulated {

using fake_cuda::Machine;

// A device that has failed starts nothing.
int launch(void* stream, unsigned blocks, unsigned threads, std::function<void()> kernel) {
  constexpr int kAssertFailed = 710;
  if (Machine::here().has_failed()) return kAssertFailed;
  Machine::here().queue(reinterpret_cast<fake_cuda::StreamId>(stream), [=] {
    const ringdp::FloatModeScope float_mode;  // as a GPU has it, whatever this thread was started with
    run_grid(blocks, threads, kernel);
  });
  return cudaSuccess;
}

void map_addresses(uint64_t* words, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) words[i] = Machine::here().mapped(words[i]);
}

}  // namespace emulated
