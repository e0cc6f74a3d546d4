// The kernels of every instruction set this CPU has against the element-by-element reference, to the bit, and the
// reference against its definition.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "guarded.h"
#include "instruction_sets.h"
#include "kernels/float_mode.h"
#include "references.h"
#include "testing.h"

namespace ringdp {
namespace {

using testing::on_every_isa;

constexpr std::array kSizes = {0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257, 1000, 1021};

template <class Body>
void for_every_reduction(Body&& body) {
  for (int d = 0; d < kDTypeCount; ++d)
    for (int o = 0; o < kReduceOpCount; ++o)
      if (reduction_supported(static_cast<DType>(d), static_cast<ReduceOp>(o)))
        body(static_cast<DType>(d), static_cast<ReduceOp>(o));
}

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

// Room for count elements, `offset` elements after a 64-byte boundary.
class Buffer : public testing::Guarded<std::byte> {
 public:
  Buffer(std::size_t element_bytes, std::size_t count, std::size_t offset)
      : Guarded(count * element_bytes, offset * element_bytes) {}
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  void copy_from(Buffer& other) { std::memcpy(data(), other.data(), size()); }
  bool same_as(Buffer& other) { return std::memcmp(data(), other.data(), size()) == 0; }
};

// The bit patterns that go wrong first, for elements of `part_bytes`.
std::vector<uint64_t> special_bits(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:  // zeros, one, infinities, quiet and signalling NaNs, subnormals, largest
      return {0,      0x8000, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7e00, 0xfe01,
              0x7c01, 0xfdff, 1,      0x8001, 0x3ff,  0x7bff, 0xfbff};
    case DType::kBfloat16:
      return {0,      0x8000, 0x3f80, 0xbf80, 0x7f80, 0xff80, 0x7fc0, 0xffc1,
              0x7f81, 0xffbf, 1,      0x8001, 0x7f,   0x7f7f, 0xff7f};
    case DType::kFloat32:
    case DType::kComplex64:
      return {0,          0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001,
              0x7f800001, 0xffbfffff, 1,          0x80000001, 0x007fffff, 0x7f7fffff, 0xff7fffff};
    case DType::kFloat64:
    case DType::kComplex128:
      return {0,
              0x8000000000000000,
              0x3ff0000000000000,
              0xbff0000000000000,
              0x7ff0000000000000,
              0xfff0000000000000,
              0x7ff8000000000000,
              0xfff8000000000001,
              0x7ff0000000000001,
              1,
              0x8000000000000001,
              0x000fffffffffffff,
              0x7fefffffffffffff};
    case DType::kBool:
      return {0, 1, 2, 255};
    default:
      return {
          0, 1, ~uint64_t{0}, 0x80, 0x7f, 0x8000, 0x7fff, 0x80000000, 0x7fffffff, uint64_t{1} << 63, ~uint64_t{0} >> 1};
  }
}

std::size_t part_bytes(DType dtype) {
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  return dtype_size(dtype) / (complex ? 2 : 1);
}

// A third special values, a third any bits, a third ordinary numbers (small integers in the type's own terms are bits
// too).
void fill(Buffer& buffer, DType dtype, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto specials = special_bits(dtype);
  const std::size_t step = part_bytes(dtype);
  for (std::size_t at = 0; at < buffer.size(); at += step) {
    uint64_t bits = random();
    const uint64_t choice = bits % 3;
    if (choice == 0 || dtype == DType::kBool) {
      bits = specials[random() % specials.size()];
    } else if (choice == 1 && step == 4) {
      bits = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int64_t>(bits)) * 0x1p-60f);
    } else if (choice == 1 && step == 8) {
      bits = std::bit_cast<uint64_t>(static_cast<double>(static_cast<int64_t>(bits)) * 0x1p-60);
    }
    std::memcpy(buffer.data() + at, &bits, step);
  }
}

std::string describe(const std::string& isa, DType dtype, ReduceOp op, std::size_t count, const char* what) {
  return isa + " " + std::string(dtype_name(dtype)) + " " + std::string(reduce_op_name(op)) + " of " +
         std::to_string(count) + " elements: " + what;
}

CASE("combine gives the reference's bits, in place and unaligned") {
  on_every_isa([](const std::string& isa) {
    for_every_reduction([&](DType dtype, ReduceOp op) {
      const auto& kernels = reduce_kernels(dtype, op);
      const std::size_t size = dtype_size(dtype);
      for (const std::size_t count : kSizes) {
        for (std::size_t offsets = 0; offsets < 8; ++offsets) {
          Buffer a(size, count, offsets & 1), b(size, count, offsets >> 1 & 1), wanted(size, count, 0);
          fill(a, dtype, 1 + offsets);
          fill(b, dtype, 1000 + count);
          reduce_kernels_reference(dtype, op).combine(wanted.data(), a.data(), b.data(), count);

          Buffer dst(size, count, offsets >> 2), over_a(size, count, offsets & 1),
              over_b(size, count, offsets >> 1 & 1);
          over_a.copy_from(a);
          over_b.copy_from(b);
          kernels.combine(dst.data(), a.data(), b.data(), count);
          kernels.combine(over_a.data(), over_a.data(), b.data(), count);
          kernels.combine(over_b.data(), a.data(), over_b.data(), count);
          CHECK_MSG(dst.same_as(wanted), describe(isa, dtype, op, count, "combine"));
          CHECK_MSG(over_a.same_as(wanted), describe(isa, dtype, op, count, "combine with dst = a"));
          CHECK_MSG(over_b.same_as(wanted), describe(isa, dtype, op, count, "combine with dst = b"));
          CHECK_MSG(dst.intact() && over_a.intact() && over_b.intact(),
                    describe(isa, dtype, op, count, "combine wrote outside"));

          reduce_kernels_reference(dtype, op).combine(wanted.data(), a.data(), a.data(), count);
          kernels.combine(a.data(), a.data(), a.data(), count);
          CHECK_MSG(a.same_as(wanted), describe(isa, dtype, op, count, "combine with dst = a = b"));
        }
      }
    });
  });
}

CASE("divide gives the reference's bits and exists for AVG alone") {
  on_every_isa([](const std::string& isa) {
    for_every_reduction([&](DType dtype, ReduceOp op) {
      const auto& kernels = reduce_kernels(dtype, op);
      CHECK_MSG((kernels.divide != nullptr) == (op == ReduceOp::kAvg), describe(isa, dtype, op, 0, "divide exists"));
      if (op != ReduceOp::kAvg) return;
      for (const std::size_t count : kSizes) {
        for (const std::size_t divisor : {1, 2, 3, 7, 200, 1000}) {
          Buffer got(dtype_size(dtype), count, divisor % 2), wanted(dtype_size(dtype), count, 0);
          fill(got, dtype, count + divisor);
          wanted.copy_from(got);
          kernels.divide(got.data(), divisor, count);
          reduce_kernels_reference(dtype, op).divide(wanted.data(), divisor, count);
          CHECK_MSG(got.same_as(wanted) && got.intact(), describe(isa, dtype, op, count, "divide"));
        }
      }
    });
  });
}

CASE("load, accumulate and store give the reference's bits and exist for half types alone") {
  on_every_isa([](const std::string& isa) {
    for_every_reduction([&](DType dtype, ReduceOp op) {
      const auto& kernels = reduce_kernels(dtype, op);
      const auto& reference = reduce_kernels_reference(dtype, op);
      const bool exist = kernels.load != nullptr && kernels.accumulate != nullptr && kernels.store != nullptr;
      CHECK_MSG(exist == is_half(dtype), describe(isa, dtype, op, 0, "load, accumulate and store exist"));
      if (!exist) return;
      for (const std::size_t count : kSizes) {
        for (std::size_t offset = 0; offset < 2; ++offset) {
          Buffer x(2, count, offset), acc(4, count, 1 - offset), wanted_acc(4, count, 0);
          fill(x, dtype, count + offset);
          kernels.load(acc.as<float>(), x.data(), count);
          reference.load(wanted_acc.as<float>(), x.data(), count);
          CHECK_MSG(acc.same_as(wanted_acc), describe(isa, dtype, op, count, "load"));

          fill(acc, DType::kFloat32, 77 + count);
          wanted_acc.copy_from(acc);
          kernels.accumulate(acc.as<float>(), x.data(), count);
          reference.accumulate(wanted_acc.as<float>(), x.data(), count);
          CHECK_MSG(acc.same_as(wanted_acc), describe(isa, dtype, op, count, "accumulate"));

          fill(acc, DType::kFloat32, 99 + count);
          for (const float divisor : {1.0f, 2.0f, 3.0f, 7.0f}) {
            Buffer dst(2, count, offset), wanted(2, count, 0);
            kernels.store(dst.data(), acc.as<float>(), divisor, count);
            reference.store(wanted.data(), acc.as<float>(), divisor, count);
            CHECK_MSG(dst.same_as(wanted) && dst.intact(), describe(isa, dtype, op, count, "store"));
          }
          CHECK_MSG(acc.intact(), describe(isa, dtype, op, count, "the accumulator was overrun"));
        }
      }
    });
  });
}

// What the reference should be, computed another way.

double exact_value(DType dtype, uint16_t bits) {
  const int mantissa_bits = dtype == DType::kFloat16 ? 10 : 7;
  const int bias = dtype == DType::kFloat16 ? 15 : 127;
  const int exponent_mask = dtype == DType::kFloat16 ? 31 : 255;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  double value;
  if (exponent == exponent_mask)
    value = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  else if (exponent == 0)
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  else
    value = std::ldexp(mantissa | 1 << mantissa_bits, exponent - bias - mantissa_bits);
  return bits & 0x8000 ? -value : value;
}

std::vector<uint16_t> stored(DType dtype, const std::vector<float>& values) {
  std::vector<uint16_t> out(values.size());
  reduce_kernels(dtype, ReduceOp::kSum).store(out.data(), values.data(), 1.0f, values.size());
  return out;
}

CASE("all 65536 half values load exactly and come back as they were") {
  on_every_isa([](const std::string& isa) {
    for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
      std::vector<uint16_t> all(65536);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
      std::vector<float> wide(all.size());
      reduce_kernels(dtype, ReduceOp::kSum).load(wide.data(), all.data(), all.size());
      const auto back = stored(dtype, wide);
      const uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto which = [&] { return isa + " " + std::string(dtype_name(dtype)) + " " + std::to_string(i); };
        const double value = exact_value(dtype, all[i]);
        const bool nan = (i & 0x7fff) > infinity;
        CHECK_MSG(nan ? std::isnan(wide[i]) : wide[i] == value && std::signbit(wide[i]) == std::signbit(value),
                  which() + " loads as another value");
        // float16: the NaN as it was but quiet. bfloat16: the one NaN of torch's rounding.
        const auto wanted = !nan ? all[i] : static_cast<uint16_t>(dtype == DType::kFloat16 ? i | 0x0200 : 0x7fc0);
        CHECK_MSG(back[i] == wanted, which() + " does not come back");
      }
    }
  });
}

CASE("float32 rounds to the nearest half, ties to even, at every boundary between two halves") {
  on_every_isa([](const std::string& isa) {
    for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
      const uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
      // The boundary above the largest finite value is where the next exponent's first value would have been.
      const double beyond = dtype == DType::kFloat16 ? 0x1p16 : 0x1p128;
      std::vector<float> values;
      std::vector<uint16_t> wanted;
      for (uint16_t low = 0; low < infinity; ++low) {
        const auto high = static_cast<uint16_t>(low + 1);
        const double above = high == infinity ? beyond : exact_value(dtype, high);
        const auto middle =
            static_cast<float>((exact_value(dtype, low) + above) / 2);  // exact: one more bit than a half
        const float below_middle = std::nextafter(middle, 0.0f);
        const float above_middle = std::nextafter(middle, std::numeric_limits<float>::infinity());
        for (const uint16_t sign : {0, 0x8000}) {
          const float factor = sign ? -1.0f : 1.0f;
          values.insert(values.end(), {factor * below_middle, factor * middle, factor * above_middle});
          const uint16_t even = low % 2 == 0 ? low : high;
          for (const uint16_t half : {low, even, high}) wanted.push_back(static_cast<uint16_t>(half | sign));
        }
      }
      for (const float large : {std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()}) {
        values.push_back(large);
        wanted.push_back(infinity);
      }
      const auto got = stored(dtype, values);
      for (std::size_t i = 0; i < got.size(); ++i)
        CHECK_MSG(got[i] == wanted[i], isa + " " + std::string(dtype_name(dtype)) + ": " + std::to_string(values[i]) +
                                           " rounds to " + std::to_string(got[i]) + ", not " +
                                           std::to_string(wanted[i]));
    }
  });
}

CASE("the mean of halves is rounded once") {
  // 2048 + 1 is no float16: rounding after every step would lose every 1 added.
  on_every_isa([](const std::string& isa) {
    const auto& kernels = reduce_kernels(DType::kFloat16, ReduceOp::kAvg);
    const std::vector<uint16_t> large(40, 0x6800), one(40, 0x3c00);  // 2048, 1
    std::vector<float> acc(40);
    std::vector<uint16_t> mean(40);
    kernels.load(acc.data(), large.data(), 40);
    for (int i = 0; i < 3; ++i) kernels.accumulate(acc.data(), one.data(), 40);
    kernels.store(mean.data(), acc.data(), 4.0f, 40);
    // 2051 / 4 = 512.75, half-way between 512.5 and 513 (0x6002, even); after three lost additions it would be 512.
    for (const uint16_t half : mean) CHECK_MSG(half == 0x6002, isa + " gives " + std::to_string(half));
  });
}

template <class T>
T combined(DType dtype, ReduceOp op, T a, T b) {
  T result{};
  reduce_kernels(dtype, op).combine(&result, &a, &b, 1);
  return result;
}

template <class T>
T mean_of(DType dtype, T sum, std::size_t count) {
  reduce_kernels(dtype, ReduceOp::kAvg).divide(&sum, count, 1);
  return sum;
}

template <class T>
void check_integer(DType dtype) {
  std::vector<T> values = {0, 1, 2, 3, 5, 100, std::numeric_limits<T>::max(), std::numeric_limits<T>::min()};
  values.push_back(static_cast<T>(-1));
  values.push_back(static_cast<T>(std::numeric_limits<T>::max() / 2 + 1));
  using Wide = __int128;  // holds every sum and every product up to 64 by 64 bits but the largest unsigned ones' sign
  using Raw = unsigned __int128;
  for (const T a : values) {
    for (const T b : values) {
      CHECK_EQ(combined<T>(dtype, ReduceOp::kSum, a, b), static_cast<T>(Wide{a} + Wide{b}));
      CHECK_EQ(combined<T>(dtype, ReduceOp::kProduct, a, b),
               static_cast<T>(static_cast<Raw>(Wide{a}) * static_cast<Raw>(Wide{b})));
      CHECK_EQ(combined<T>(dtype, ReduceOp::kMin, a, b), std::min(a, b));
      CHECK_EQ(combined<T>(dtype, ReduceOp::kMax, a, b), std::max(a, b));
      CHECK_EQ(combined<T>(dtype, ReduceOp::kBand, a, b), static_cast<T>(a & b));
      CHECK_EQ(combined<T>(dtype, ReduceOp::kBor, a, b), static_cast<T>(a | b));
      CHECK_EQ(combined<T>(dtype, ReduceOp::kBxor, a, b), static_cast<T>(a ^ b));
    }
    for (const std::size_t divisor : {1, 2, 3, 300})
      CHECK_EQ(mean_of<T>(dtype, a, divisor), static_cast<T>(Wide{a} / Wide(divisor)));
  }
}

CASE("integers wrap, and their mean truncates towards zero") {
  check_integer<uint8_t>(DType::kUint8);
  check_integer<int8_t>(DType::kInt8);
  check_integer<int16_t>(DType::kInt16);
  check_integer<int32_t>(DType::kInt32);
  check_integer<int64_t>(DType::kInt64);
  check_integer<uint16_t>(DType::kUint16);
  check_integer<uint32_t>(DType::kUint32);
  check_integer<uint64_t>(DType::kUint64);
  CHECK_EQ(mean_of<int32_t>(DType::kInt32, -7, 2), -3);
}

template <class T, class Bits>
void check_float(DType dtype) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const T infinity = std::numeric_limits<T>::infinity();
  const auto bits = [](T value) { return std::bit_cast<Bits>(value); };
  const auto payload = [&](Bits extra) { return std::bit_cast<T>(static_cast<Bits>(bits(-nan) | extra)); };
  on_every_isa([&](const std::string&) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct}) {
      for (const T other : {T{1}, T{0}, infinity, nan, payload(3)}) {
        CHECK_EQ(bits(combined<T>(dtype, op, payload(5), other)), bits(nan));
        CHECK_EQ(bits(combined<T>(dtype, op, other, payload(5))), bits(nan));
      }
    }
    CHECK_EQ(bits(combined<T>(dtype, ReduceOp::kSum, infinity, -infinity)), bits(nan));
    CHECK_EQ(bits(combined<T>(dtype, ReduceOp::kProduct, infinity, T{0})), bits(nan));
    CHECK_EQ(bits(combined<T>(dtype, ReduceOp::kSum, T{-0.0}, T{-0.0})), bits(T{-0.0}));
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (const T other : {T{1}, -infinity, infinity}) {
        CHECK_EQ(bits(combined<T>(dtype, op, payload(5), other)), bits(payload(5)));
        CHECK_EQ(bits(combined<T>(dtype, op, other, payload(5))), bits(payload(5)));
      }
      CHECK_EQ(bits(combined<T>(dtype, op, payload(5), payload(6))), bits(payload(5)));
      CHECK_EQ(bits(combined<T>(dtype, op, T{0.0}, T{-0.0})), bits(T{-0.0}));
      CHECK_EQ(bits(combined<T>(dtype, op, T{-0.0}, T{0.0})), bits(T{0.0}));
    }
    CHECK_EQ(combined<T>(dtype, ReduceOp::kMin, T{2}, T{-3}), T{-3});
    CHECK_EQ(combined<T>(dtype, ReduceOp::kMax, T{2}, T{-3}), T{2});
    CHECK_EQ(mean_of<T>(dtype, T{1}, 3), T{1} / T{3});
    const T smallest = std::numeric_limits<T>::denorm_min();
    CHECK_EQ(combined<T>(dtype, ReduceOp::kSum, smallest, smallest), smallest + smallest);
  });
}

CASE("floats: which NaN and which zero come out is defined, subnormals are kept") {
  check_float<float, uint32_t>(DType::kFloat32);
  check_float<double, uint64_t>(DType::kFloat64);
}

CASE("complex numbers multiply by the written-out formula") {
  struct Complex {
    float re, im;
  };
  on_every_isa([](const std::string&) {
    const auto product = combined<Complex>(DType::kComplex64, ReduceOp::kProduct, {1, 2}, {3, 4});
    CHECK_EQ(product.re, -5.0f);
    CHECK_EQ(product.im, 10.0f);
    // (1 + e)² rounded before the subtraction is 1 + 2e, so nothing is left; a fused multiply-add would leave e².
    const float e = 0x1p-12f;
    const std::vector<Complex> a(37, Complex{1 + e, 1 + 2 * e}), b(37, Complex{1 + e, 1.0f});
    std::vector<Complex> dst(37);
    reduce_kernels(DType::kComplex64, ReduceOp::kProduct).combine(dst.data(), a.data(), b.data(), 37);
    for (const Complex& value : dst) CHECK_EQ(value.re, 0.0f);
    const auto mean = mean_of<Complex>(DType::kComplex64, {9, -3}, 3);
    CHECK_EQ(mean.re, 3.0f);
    CHECK_EQ(mean.im, -1.0f);
  });
}

CASE("bool: SUM and MAX are or, PRODUCT and MIN are and, results are 0 or 1") {
  on_every_isa([](const std::string&) {
    for (const int a : {0, 1, 2, 255}) {
      for (const int b : {0, 1, 4, 128}) {
        const auto got = [&](ReduceOp op) {
          return static_cast<int>(
              combined<uint8_t>(DType::kBool, op, static_cast<uint8_t>(a), static_cast<uint8_t>(b)));
        };
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor}) CHECK_EQ(got(op), a || b ? 1 : 0);
        for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand})
          CHECK_EQ(got(op), a && b ? 1 : 0);
        CHECK_EQ(got(ReduceOp::kBxor), (a != 0) != (b != 0) ? 1 : 0);
      }
    }
  });
}

CASE("a reduction that a type does not have is refused by name") {
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    const bool bitwise = dtype <= DType::kUint64 || dtype == DType::kBool;
    const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      bool wanted = true;
      if (op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor) wanted = bitwise;
      if (op == ReduceOp::kMin || op == ReduceOp::kMax) wanted = !complex;
      if (op == ReduceOp::kAvg) wanted = dtype != DType::kBool;
      if (dtype > DType::kComplex128) wanted = false;  // only moved
      CHECK_EQ(reduction_supported(dtype, op), wanted);
      if (!wanted) {
        const std::string message = CHECK_THROWS(ErrorKind::kValue, reduce_kernels(dtype, op));
        CHECK(message.find(dtype_name(dtype)) != std::string::npos);
        CHECK(message.find(reduce_op_name(op)) != std::string::npos);
      }
    }
  }
  CHECK(!reduction_supported(static_cast<DType>(200), ReduceOp::kSum));
  CHECK(!reduction_supported(DType::kFloat32, static_cast<ReduceOp>(200)));
}

CASE("each instruction set has loops of its own, and one the CPU lacks is refused") {
  std::vector<decltype(ReduceKernels::combine)> seen;
  on_every_isa([&](const std::string& isa) {
    CHECK_EQ(isa_name(current_isa()), isa);
    const auto combine = reduce_kernels(DType::kFloat32, ReduceOp::kSum).combine;
    for (const auto other : seen) CHECK(combine != other);
    seen.push_back(combine);
  });
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512})
    if (isa > best_isa()) CHECK_THROWS(ErrorKind::kValue, select_isa(isa));
}

#if defined(__x86_64__)
CASE("a thread that flushes subnormals to zero gets the same bits inside a FloatModeScope, and its mode back") {
  const unsigned before = _mm_getcsr();
  const unsigned flushing = before | 0x8040;  // flush to zero, denormals are zero
  const float smallest = std::numeric_limits<float>::denorm_min();
  on_every_isa([&](const std::string&) {
    const std::vector<float> x(37, smallest);
    std::vector<float> flushed(37), kept(37);
    const auto combine = reduce_kernels(DType::kFloat32, ReduceOp::kSum).combine;
    _mm_setcsr(flushing);
    combine(flushed.data(), x.data(), x.data(), 37);
    {
      const FloatModeScope scope;
      combine(kept.data(), x.data(), x.data(), 37);
    }
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    for (const float value : flushed) CHECK_EQ(std::bit_cast<uint32_t>(value), 0u);  // or this test shows nothing
    for (const float value : kept) CHECK_EQ(std::bit_cast<uint32_t>(value), 2u);
    CHECK_EQ(after & 0xe040, flushing & 0xe040);
  });
}
#endif

CASE("elements are multiplied to the reference's bits") {
  on_every_isa([](const std::string& isa) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
      for (const int size : {0, 1, 7, 64, 1025}) {
        const auto count = static_cast<std::size_t>(size);
        for (const std::size_t offset : {std::size_t{0}, std::size_t{1}}) {
          Buffer ours(dtype_size(dtype), count, offset), theirs(dtype_size(dtype), count, offset);
          fill(ours, dtype, 5);
          fill(theirs, dtype, 5);
          multiply(dtype)(ours.data(), 1.0 / 3, count);
          multiply_reference(dtype)(theirs.data(), 1.0 / 3, count);
          CHECK_MSG(ours.same_as(theirs),
                    isa + " " + std::string(dtype_name(dtype)) + " of " + std::to_string(count) + " elements");
        }
      }
    }
    CHECK(multiply(DType::kFloat16) == nullptr);
  });
}

CASE("two operands are weighed, and a mean is taken in one pass, to the reference's bits") {
  on_every_isa([](const std::string& isa) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kComplex64, DType::kComplex128}) {
      const bool real = weigh(dtype) != nullptr;
      CHECK_EQ(real, dtype == DType::kFloat32 || dtype == DType::kFloat64);
      for (const int size : {0, 1, 7, 64, 1025}) {
        const auto count = static_cast<std::size_t>(size);
        for (const std::size_t divisor : {std::size_t{1}, std::size_t{2}, std::size_t{3}}) {
          Buffer a(dtype_size(dtype), count, 0), ours(dtype_size(dtype), count, 1), theirs(dtype_size(dtype), count, 1);
          fill(a, dtype, 3);
          const auto same = [&](const std::string& what) {
            CHECK_MSG(ours.same_as(theirs), what + " " + isa + " " + std::string(dtype_name(dtype)) + " of " +
                                                std::to_string(count) + " elements");
          };
          fill(ours, dtype, 4);
          fill(theirs, dtype, 4);
          const ReduceKernels& kernels = reduce_kernels(dtype, ReduceOp::kAvg);
          kernels.mean(ours.data(), a.data(), ours.data(), divisor, count);
          kernels.combine(theirs.data(), a.data(), theirs.data(), count);
          kernels.divide(theirs.data(), divisor, count);
          same("mean");
          if (!real) continue;
          fill(ours, dtype, 4);
          fill(theirs, dtype, 4);
          weigh(dtype)(ours.data(), a.data(), 1.0 / 3, ours.data(), 7.1, divisor, count);
          weigh_reference(dtype)(theirs.data(), a.data(), 1.0 / 3, theirs.data(), 7.1, divisor, count);
          same("weigh");
        }
      }
    }
  });
}

CASE("the first infinity or NaN is found where the reference finds it, and nowhere else") {
  on_every_isa([](const std::string& isa) {
    for (const DType dtype :
         {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64, DType::kComplex64, DType::kComplex128}) {
      for (const int size : {0, 1, 7, 64, 1021, 1024, 1025, 3000}) {
        const auto count = static_cast<std::size_t>(size);
        for (const std::size_t offset : {std::size_t{0}, std::size_t{1}}) {
          Buffer buffer(dtype_size(dtype), count, offset);
          std::memset(buffer.data(), 0x3b, buffer.size());  // finite in every type, as is its negative
          CHECK_MSG(first_non_finite(dtype)(buffer.data(), count) == count, isa + ": finite elements");
          for (std::size_t at = 0; at < count; at += count / 13 + 1) {
            fill(buffer, dtype, at);
            const std::size_t found = first_non_finite(dtype)(buffer.data(), count);
            CHECK_MSG(found == first_non_finite_reference(dtype)(buffer.data(), count),
                      isa + " " + std::string(dtype_name(dtype)) + " of " + std::to_string(count) + " elements");
          }
        }
      }
    }
    CHECK(first_non_finite(DType::kInt32) == nullptr);
  });
}

CASE("each of the 65536 halves of both kinds is finite just where its value is") {
  on_every_isa([](const std::string& isa) {
    for (const DType dtype : {DType::kFloat16, DType::kBfloat16})
      for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
        const auto half = static_cast<uint16_t>(bits);
        float value = 0;
        reduce_kernels_reference(dtype, ReduceOp::kSum).load(&value, &half, 1);
        CHECK_MSG((first_non_finite(dtype)(&half, 1) == 1) == std::isfinite(value), isa + ": " + std::to_string(bits));
      }
  });
}

CASE("kernels are looked up and run by several threads at once") {
  testing::run_ranks(4, [](int rank) {
    std::vector<float> a(1000, static_cast<float>(rank)), b(1000, 1.0f);
    for (int i = 0; i < 50; ++i)
      reduce_kernels(DType::kFloat32, ReduceOp::kSum).combine(a.data(), a.data(), b.data(), 1000);
    for (const float value : a) CHECK_EQ(value, static_cast<float>(rank + 50));
  });
}

}  // namespace
}  // namespace ringdp
