// The definition, element by element: what the vector loops are compared with, to the bit.
#include <cmath>

#include "kernels/table.h"
#include "references.h"

namespace ringdp::kernels {
namespace {

struct ReferenceLoops {
  template <class T, class Op, std::size_t kParts>
  static void combine(void* dst, const void* a, const void* b, std::size_t count) {
    for (std::size_t i = 0; i < kParts * count; ++i)
      static_cast<T*>(dst)[i] = Op::apply(static_cast<const T*>(a)[i], static_cast<const T*>(b)[i]);
  }

  template <class T, std::size_t kParts>
  static void divide(void* x, std::size_t divisor, std::size_t count) {
    for (std::size_t i = 0; i < kParts * count; ++i)
      static_cast<T*>(x)[i] = divided(static_cast<T*>(x)[i], static_cast<Divisor<T>>(divisor));
  }

  template <class T, std::size_t kParts>
  static void mean(void* dst, const void* a, const void* b, std::size_t divisor, std::size_t count) {
    combine<T, Sum, kParts>(dst, a, b, count);
    divide<T, kParts>(dst, divisor, count);
  }

  template <class Format, class Op>
  static void half_combine(void* dst, const void* a, const void* b, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const float x = Format::widen(static_cast<const uint16_t*>(a)[i]);
      const float y = Format::widen(static_cast<const uint16_t*>(b)[i]);
      static_cast<uint16_t*>(dst)[i] = Format::narrow(Op::apply(x, y));
    }
  }

  template <class Format>
  static void half_divide(void* x, std::size_t divisor, std::size_t count) {
    uint16_t* values = static_cast<uint16_t*>(x);
    for (std::size_t i = 0; i < count; ++i)
      values[i] = Format::narrow(Format::widen(values[i]) / static_cast<float>(divisor));
  }

  template <class T>
  static void multiply(void* x, double factor, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) static_cast<T*>(x)[i] *= static_cast<T>(factor);
  }

  template <class T>
  static void weigh(void* dst, const void* a, double by_a, const void* b, double by_b, std::size_t divisor,
                    std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      T x = static_cast<const T*>(a)[i];
      T y = static_cast<const T*>(b)[i];
      multiply<T>(&x, by_a, 1);
      multiply<T>(&y, by_b, 1);
      mean<T, 1>(static_cast<T*>(dst) + i, &x, &y, divisor, 1);
    }
  }

  template <class T, std::size_t kParts>
  static std::size_t first_non_finite(const void* x, std::size_t count) {
    for (std::size_t i = 0; i < kParts * count; ++i) {
      if constexpr (std::is_floating_point_v<T>) {
        if (!std::isfinite(static_cast<const T*>(x)[i])) return i / kParts;
      } else {
        if (!std::isfinite(T::widen(static_cast<const uint16_t*>(x)[i]))) return i / kParts;
      }
    }
    return count;
  }

  template <class Format>
  static void half_load(float* acc, const void* x, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) acc[i] = Format::widen(static_cast<const uint16_t*>(x)[i]);
  }

  template <class Format, class Op>
  static void half_accumulate(float* acc, const void* x, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      acc[i] = Op::apply(acc[i], Format::widen(static_cast<const uint16_t*>(x)[i]));
  }

  template <class Format>
  static void half_store(void* dst, const float* acc, float divisor, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) static_cast<uint16_t*>(dst)[i] = Format::narrow(acc[i] / divisor);
  }
};

constexpr KernelTable kTable = TableBuilder<ReferenceLoops>::build();

}  // namespace

}  // namespace ringdp::kernels

namespace ringdp {

const ReduceKernels& reduce_kernels_reference(DType dtype, ReduceOp op) {
  reduce_kernels(dtype, op);  // throws where there are none
  return kernels::kTable.reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
}

FirstNonFinite first_non_finite_reference(DType dtype) {
  return kernels::kTable.first_non_finite[static_cast<std::size_t>(dtype)];
}

Multiply multiply_reference(DType dtype) { return kernels::kTable.multiply[static_cast<std::size_t>(dtype)]; }

Weigh weigh_reference(DType dtype) { return kernels::kTable.weigh[static_cast<std::size_t>(dtype)]; }

}  // namespace ringdp
