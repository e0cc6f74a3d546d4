// The element types of gradients, for kernels that look at any of them.
// Constants and device functions; any thread.
#pragma once

#include "cuda/halves.cuh"
#include "cuda/launch.cuh"

namespace ringdp::cuda {

template <class T>
struct Number {
  using Bits = typename kernels::Exponent<T>::Bits;
  using Packed = std::conditional_t<sizeof(Bits) == 2, uint32_t, Bits>;  // tested at once

  template <class Some>
  static __device__ bool finite(Some bits) {
    if constexpr (sizeof(Some) > sizeof(Bits))
      return non_finite_pair<T>(bits) == 0;
    else
      return (kernels::carry_of_non_finite<T>(bits) & kernels::kSignBit<T>) == 0;
  }
};

// Calls body(Number<T>{}). Throws Error(kValue) for a type that is not a floating-point type.
template <class Body>
void with_numbers(DType dtype, const char* what, Body&& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Number<Float16>{});
    case DType::kBfloat16:
      return body(Number<Bfloat16>{});
    case DType::kFloat32:
      return body(Number<float>{});
    case DType::kFloat64:
      return body(Number<double>{});
    default:
      throw Error(ErrorKind::kValue, std::string("cuda: ") + what +
                                         " is for float16, bfloat16, float32 and float64, not " +
                                         std::string(dtype_name(dtype)));
  }
}

}  // namespace ringdp::cuda
