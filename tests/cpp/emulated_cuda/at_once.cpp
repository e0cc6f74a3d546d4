#include "at_once.h"

#include "cuda_runtime.h"

namespace emulated {

int launch(void*, unsigned blocks, unsigned threads, std::function<void()> kernel) {
  if (std::exchange(fail_next_launch, false)) return 1;
  ++launches;
  run_grid(blocks, threads, kernel);
  return cudaSuccess;
}

void map_addresses(uint64_t*, std::size_t) {}

}  // namespace emulated
