// find_non_finite: one read, by the bits of the exponents.
#include "cuda/flat.cuh"
#include "cuda/numbers.cuh"

namespace ringdp::cuda {
namespace {

template <class Numbers>
__global__ void __launch_bounds__(kThreads)
    find_kernel(const typename Numbers::Bits* values, Flat flat, int32_t* found) {
  bool finite = true;
  for_flat<typename Numbers::Packed>(values, flat, [&](auto bits) { finite &= Numbers::finite(bits); });
  if (!finite) *found = 1;
}

}  // namespace

void find_non_finite(const void* values, std::size_t count, DType dtype, int32_t* found, Stream stream) {
  with_numbers(dtype, "find_non_finite", [&]<class Numbers>(Numbers) {
    const auto* bits = static_cast<const typename Numbers::Bits*>(values);
    const Flat all = flat(values, count, sizeof *bits);
    launch("look for infinities", stream, all.tiles(), find_kernel<Numbers>, bits, all, found);
  });
}

}  // namespace ringdp::cuda
