// The definition of each reduction for one element, which every loop, scalar or vector, applies. Stateless, any
// thread. Integers are computed unsigned, so they wrap. Arithmetic that ends in a NaN gives the one quiet NaN 0x7fc0…:
// the payload that the hardware keeps depends on the order of operands that the compiler chose for a commutative
// instruction, and so on the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/half.h"

namespace ringdp::kernels {

template <class T>
using Unsigned = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline constexpr T kQuietNan = std::numeric_limits<T>::quiet_NaN();

template <class T>
RINGDP_ALWAYS_INLINE T one_nan(T x) {
  return x != x ? T{kQuietNan<T>} : x;
}

struct Sum {
  template <class T>
  static RINGDP_ALWAYS_INLINE T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return one_nan(a + b);
    else
      return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
  }
};

struct Product {
  template <class T>
  static RINGDP_ALWAYS_INLINE T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>)
      return one_nan(a * b);
    else
      return static_cast<T>(static_cast<Unsigned<T>>(a) * static_cast<Unsigned<T>>(b));
  }
};

// A NaN from either side wins, the first operand's if both are; of equal values (0.0 and -0.0) the second is taken.
struct Min {
  template <class T>
  static RINGDP_ALWAYS_INLINE T apply(T a, T b) {
    const T smaller = a < b ? a : b;
    return a != a ? a : smaller;
  }
};

struct Max {
  template <class T>
  static RINGDP_ALWAYS_INLINE T apply(T a, T b) {
    const T larger = a > b ? a : b;
    return a != a ? a : larger;
  }
};

struct BitAnd {
  template <class T>
  static RINGDP_ALWAYS_INLINE T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct BitOr {
  template <class T>
  static RINGDP_ALWAYS_INLINE T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct BitXor {
  template <class T>
  static RINGDP_ALWAYS_INLINE T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// bool is a byte; any byte but 0 counts as true, results are 0 or 1.
struct LogicalAnd {
  static RINGDP_ALWAYS_INLINE uint8_t apply(uint8_t a, uint8_t b) { return static_cast<uint8_t>((a != 0) & (b != 0)); }
};

struct LogicalOr {
  static RINGDP_ALWAYS_INLINE uint8_t apply(uint8_t a, uint8_t b) { return static_cast<uint8_t>((a != 0) | (b != 0)); }
};

struct LogicalXor {
  static RINGDP_ALWAYS_INLINE uint8_t apply(uint8_t a, uint8_t b) { return static_cast<uint8_t>((a != 0) ^ (b != 0)); }
};

template <class T>
struct Complex {
  T re;
  T im;
};

// one_nan around each product keeps it apart from the addition: gcc 12 fuses alternating additions and subtractions of
// products (vfmaddsub) on AVX-512 in spite of -ffp-contract=off. One value a line: nested, it does not vectorise for
// AVX2.
struct ComplexProduct {
  template <class T>
  static RINGDP_ALWAYS_INLINE Complex<T> apply(Complex<T> a, Complex<T> b) {
    const T re_re = one_nan(a.re * b.re);
    const T im_im = one_nan(a.im * b.im);
    const T re_im = one_nan(a.re * b.im);
    const T im_re = one_nan(a.im * b.re);
    const T re = re_re - im_im;
    const T im = re_im + im_re;
    return {one_nan(re), one_nan(im)};
  }
};

// Division in the type the mean is defined in: floats in their own, integers truncating towards zero.
template <class T>
using Divisor =
    std::conditional_t<std::is_floating_point_v<T>, T, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

template <class T>
RINGDP_ALWAYS_INLINE T divided(T x, Divisor<T> divisor) {
  return static_cast<T>(static_cast<Divisor<T>>(x) / divisor);
}

// How a type's bits say that a value is not finite: all bits of the exponent are set. Adding one at the exponent's
// lowest bit to the bits without sign then carries into the sign.
template <class T>
struct Exponent {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  static constexpr Bits kOne = Bits{1} << (std::numeric_limits<T>::digits - 1);
};
template <>
struct Exponent<Float16> {
  using Bits = uint16_t;
  static constexpr Bits kOne = 0x0400;
};
template <>
struct Exponent<Bfloat16> {
  using Bits = uint16_t;
  static constexpr Bits kOne = 0x0080;
};

template <class T>
inline constexpr auto kSignBit = static_cast<typename Exponent<T>::Bits>(
    typename Exponent<T>::Bits{1} << (8 * sizeof(typename Exponent<T>::Bits) - 1));

// The sign bit is set for an infinity or a NaN; other bits are undefined.
template <class T, class Bits>
RINGDP_ALWAYS_INLINE Bits carry_of_non_finite(Bits bits) {
  return static_cast<Bits>(static_cast<Bits>(bits & static_cast<Bits>(~kSignBit<T>)) + Exponent<T>::kOne);
}

}  // namespace ringdp::kernels
