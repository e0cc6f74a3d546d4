// FiniteReport: what an all-reduce saw of infinities and NaNs, looked for where the bytes are in a cache anyway.
// Made by the caller, written by the thread that drives the engine, read by anybody once the Work is done.
#pragma once

#include <cstddef>

namespace ringdp {

struct FiniteReport {
  bool finite = true;              // all elements of the result; the same on all ranks
  const std::byte* own = nullptr;  // the first element of this rank's input that was not finite, as far as it was found
};

}  // namespace ringdp
