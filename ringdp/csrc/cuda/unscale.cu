// unscale: loss scale and mean taken out of gradients in place, and infinities found, in one read and one write.
#include "cuda/flat.cuh"
#include "cuda/numbers.cuh"

namespace ringdp::cuda {
namespace {

template <class Numbers>
__global__ void __launch_bounds__(kThreads)
    unscale_kernel(typename Numbers::Bits* x, Flat flat, const float* inverse_scale, float divisor, float* found_inf) {
  using Value = typename Numbers::Value;
  const Value inverse = *inverse_scale, by = divisor;
  bool finite = true;
  for_flat<true, typename Numbers::Bits>(x, flat, [&](auto& bits) {
    finite &= Numbers::finite(bits);
    const Value value = Numbers::value(bits) * inverse;
    bits = Numbers::bits(by == 1 ? value : value / by);
  });
  if (!finite) *found_inf = 1.0f;
}

}  // namespace

void unscale(void* x, std::size_t count, DType dtype, const float* inverse_scale, float divisor, float* found_inf,
             Stream stream) {
  with_numbers(dtype, "unscale", [&]<class Numbers>(Numbers) {
    auto* bits = static_cast<typename Numbers::Bits*>(x);
    const Flat all = flat(x, count, sizeof *bits);
    launch("unscale gradients", stream, all.tiles(), unscale_kernel<Numbers>, bits, all, inverse_scale, divisor,
           found_inf);
  });
}

}  // namespace ringdp::cuda
