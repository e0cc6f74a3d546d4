// CPU loops over elements: reduce, widen, round, look for infinities. Stateless, any thread. The instruction set is
// chosen once, at the first call (RINGDP has no environment variables in C++: `select_isa` is called from Python's
// configuration or by a test). Every instruction set gives the same bits: no fused multiply-add, no reordering. A NaN
// from either operand propagates; SUM, AVG and PRODUCT give the one quiet NaN 0x7fc0…, MIN and MAX keep the operand's
// own (the first's if both are; of 0.0 and -0.0 they take the second). Pointers are aligned to their element, no more.
// The floating-point mode is the default one (kernels/float_mode.h).
#pragma once

#include <cstddef>
#include <string_view>

#include "base/types.h"

namespace ringdp {

enum class Isa { kScalar, kAvx2, kAvx512 };

std::string_view isa_name(Isa isa);
Isa best_isa();  // what this CPU has
Isa current_isa();
void select_isa(Isa isa);  // for tests; throws Error if the CPU lacks it

// The loops of one (dtype, op). `combine`: dst[i] = a[i] op b[i]; dst may be a, b or neither (no partial overlap). SUM
// and AVG have the same combine; AVG is finished by `divide`, or its last combine and `divide` are one pass of `mean`,
// with the same bits (float and complex types only). Half types add in float32: `load` acc = x, `accumulate` acc = acc
// op x, `store` dst = round(acc / divisor); for other types these three are null, and for half types `combine` rounds
// after every step (use the accumulator instead). Integers wrap; BAND/BOR/BXOR exist for integers and bool only; bool
// SUM and MAX are "or", PRODUCT and MIN "and", bool has no AVG, complex no MIN and MAX.
struct ReduceKernels {
  void (*combine)(void* dst, const void* a, const void* b, std::size_t count) = nullptr;
  void (*divide)(void* x, std::size_t divisor,
                 std::size_t count) = nullptr;  // AVG only; integers truncate towards zero
  void (*mean)(void* dst, const void* a, const void* b, std::size_t divisor, std::size_t count) = nullptr;
  void (*load)(float* acc, const void* x, std::size_t count) = nullptr;
  void (*accumulate)(float* acc, const void* x, std::size_t count) = nullptr;
  void (*store)(void* dst, const float* acc, float divisor, std::size_t count) = nullptr;
};

bool reduction_supported(DType dtype, ReduceOp op);
const ReduceKernels& reduce_kernels(DType dtype, ReduceOp op);  // throws Error(kValue) naming both if unsupported

// The index of the first infinity or NaN among `count` elements, `count` if there is none; of a complex number both
// parts count. Looks at exponent bits, so no floating-point mode matters.
using FirstNonFinite = std::size_t (*)(const void* x, std::size_t count);
FirstNonFinite first_non_finite(DType dtype);  // null for types that have neither

// Null for types other than float32 and float64.
using Multiply = void (*)(void* x, double factor, std::size_t count);  // x[i] *= factor
Multiply multiply(DType dtype);
// dst[i] = (a[i] * by_a + b[i] * by_b) / divisor, each product rounded: the bits of two `multiply`, `combine` and
// `divide`.
using Weigh = void (*)(void* dst, const void* a, double by_a, const void* b, double by_b, std::size_t divisor,
                       std::size_t count);
Weigh weigh(DType dtype);

}  // namespace ringdp

// The target attributes of functions that loop, one per instruction set (dispatch.cpp asks the CPU for the same
// features). x86-64 only. Compilers prefer 256-bit vectors unless these say otherwise. Constant data; any thread.

#define RINGDP_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#if defined(__clang__)
#define RINGDP_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"), min_vector_width(512)))
#else
#define RINGDP_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")))
#endif
