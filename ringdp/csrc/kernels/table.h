// Which kernels exist for which (dtype, op), filled in from a set of loops. One table per instruction set.
// Constant data; any thread. Included by dispatch.cpp and the files with the loops: scalar.cpp, avx2.cpp, avx512.cpp.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/elements.h"
#include "kernels/kernels.h"

namespace ringdp::kernels {

struct KernelTable {
  // combine == nullptr: the pair is not supported.
  std::array<std::array<ReduceKernels, kReduceOpCount>, kDTypeCount> reduce{};
  std::array<FirstNonFinite, kDTypeCount> first_non_finite{};
  std::array<Multiply, kDTypeCount> multiply{};
  std::array<Weigh, kDTypeCount> weigh{};
};

const KernelTable& scalar_table();
const KernelTable* avx2_table();  // null where the compiler does not target x86-64
const KernelTable* avx512_table();
const KernelTable& counting_table();  // see CountedWork

// `Loops` has static member templates
//   combine<T, Op, kParts>, divide<T, kParts>, mean<T, kParts>     kParts: Ts per element, 2 for complex
//   half_combine<Format, Op>, half_divide<Format>, half_load<Format>, half_accumulate<Format, Op>, half_store<Format>
//   first_non_finite<T, kParts>                            T: Float16 and Bfloat16 for half types
//   multiply<T>, weigh<T>
template <class Loops>
class TableBuilder {
 public:
  static constexpr KernelTable build() {
    TableBuilder builder;
    builder.add_integer<uint8_t>(DType::kUint8);
    builder.add_integer<int8_t>(DType::kInt8);
    builder.add_integer<int16_t>(DType::kInt16);
    builder.add_integer<int32_t>(DType::kInt32);
    builder.add_integer<int64_t>(DType::kInt64);
    builder.add_integer<uint16_t>(DType::kUint16);
    builder.add_integer<uint32_t>(DType::kUint32);
    builder.add_integer<uint64_t>(DType::kUint64);
    builder.add_half<Float16>(DType::kFloat16);
    builder.add_half<Bfloat16>(DType::kBfloat16);
    builder.add_number<float>(DType::kFloat32);
    builder.add_number<double>(DType::kFloat64);
    builder.add_bool();
    builder.add_complex<float>(DType::kComplex64);
    builder.add_complex<double>(DType::kComplex128);
    builder.find_in(DType::kFloat16) = Loops::template first_non_finite<Float16, 1>;
    builder.find_in(DType::kBfloat16) = Loops::template first_non_finite<Bfloat16, 1>;
    builder.find_in(DType::kFloat32) = Loops::template first_non_finite<float, 1>;
    builder.find_in(DType::kFloat64) = Loops::template first_non_finite<double, 1>;
    builder.find_in(DType::kComplex64) = Loops::template first_non_finite<float, 2>;
    builder.find_in(DType::kComplex128) = Loops::template first_non_finite<double, 2>;
    builder.table_.multiply[static_cast<std::size_t>(DType::kFloat32)] = Loops::template multiply<float>;
    builder.table_.multiply[static_cast<std::size_t>(DType::kFloat64)] = Loops::template multiply<double>;
    builder.table_.weigh[static_cast<std::size_t>(DType::kFloat32)] = Loops::template weigh<float>;
    builder.table_.weigh[static_cast<std::size_t>(DType::kFloat64)] = Loops::template weigh<double>;
    return builder.table_;
  }

 private:
  constexpr FirstNonFinite& find_in(DType dtype) { return table_.first_non_finite[static_cast<std::size_t>(dtype)]; }
  constexpr ReduceKernels& at(DType dtype, ReduceOp op) {
    return table_.reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
  }

  template <class T>
  constexpr void add_number(DType dtype) {
    at(dtype, ReduceOp::kSum).combine = Loops::template combine<T, Sum, 1>;
    at(dtype, ReduceOp::kAvg) = {.combine = Loops::template combine<T, Sum, 1>, .divide = Loops::template divide<T, 1>};
    if constexpr (std::is_floating_point_v<T>) at(dtype, ReduceOp::kAvg).mean = Loops::template mean<T, 1>;
    at(dtype, ReduceOp::kProduct).combine = Loops::template combine<T, Product, 1>;
    at(dtype, ReduceOp::kMin).combine = Loops::template combine<T, Min, 1>;
    at(dtype, ReduceOp::kMax).combine = Loops::template combine<T, Max, 1>;
  }

  template <class T>
  constexpr void add_integer(DType dtype) {
    add_number<T>(dtype);
    at(dtype, ReduceOp::kBand).combine = Loops::template combine<T, BitAnd, 1>;
    at(dtype, ReduceOp::kBor).combine = Loops::template combine<T, BitOr, 1>;
    at(dtype, ReduceOp::kBxor).combine = Loops::template combine<T, BitXor, 1>;
  }

  constexpr void add_bool() {
    constexpr auto logical_and = Loops::template combine<uint8_t, LogicalAnd, 1>;
    constexpr auto logical_or = Loops::template combine<uint8_t, LogicalOr, 1>;
    at(DType::kBool, ReduceOp::kSum).combine = logical_or;
    at(DType::kBool, ReduceOp::kProduct).combine = logical_and;
    at(DType::kBool, ReduceOp::kMin).combine = logical_and;
    at(DType::kBool, ReduceOp::kMax).combine = logical_or;
    at(DType::kBool, ReduceOp::kBand).combine = logical_and;
    at(DType::kBool, ReduceOp::kBor).combine = logical_or;
    at(DType::kBool, ReduceOp::kBxor).combine = Loops::template combine<uint8_t, LogicalXor, 1>;
  }

  template <class T>
  constexpr void add_complex(DType dtype) {
    at(dtype, ReduceOp::kSum).combine = Loops::template combine<T, Sum, 2>;
    at(dtype, ReduceOp::kAvg) = {.combine = Loops::template combine<T, Sum, 2>,
                                 .divide = Loops::template divide<T, 2>,
                                 .mean = Loops::template mean<T, 2>};
    at(dtype, ReduceOp::kProduct).combine = Loops::template combine<Complex<T>, ComplexProduct, 1>;
  }

  template <class Format, class Op>
  constexpr void add_half_op(DType dtype, ReduceOp op) {
    at(dtype, op) = {.combine = Loops::template half_combine<Format, Op>,
                     .divide = op == ReduceOp::kAvg ? Loops::template half_divide<Format> : nullptr,
                     .load = Loops::template half_load<Format>,
                     .accumulate = Loops::template half_accumulate<Format, Op>,
                     .store = Loops::template half_store<Format>};
  }

  template <class Format>
  constexpr void add_half(DType dtype) {
    add_half_op<Format, Sum>(dtype, ReduceOp::kSum);
    add_half_op<Format, Sum>(dtype, ReduceOp::kAvg);
    add_half_op<Format, Product>(dtype, ReduceOp::kProduct);
    add_half_op<Format, Min>(dtype, ReduceOp::kMin);
    add_half_op<Format, Max>(dtype, ReduceOp::kMax);
  }

  KernelTable table_{};
};

}  // namespace ringdp::kernels
