// Rows of a table, `dim` numbers each, one after the other: gathered and encoded for the network, added up in bags and
// by row, and updated by sparse optimizers. T is float or double. Stateless, any thread; every instruction set gives
// the same bits: no fused multiply-add, sums of bags and rows add in the order given, and sums over a row add in 16
// lanes, which are then added in halves; the payload of a NaN that arithmetic gives may differ. The floating-point
// mode is the default one (kernels/float_mode.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ringdp::rows {

using Index = int32_t;  // of a row; negative: there is none, which reads as zeros and takes no sum

// The format of rows on the wire. int8: codes from -127 to 127, then a float32, the value of code 1. It is NaN for a
// row with an element that is not finite in float32, and 0 for a row of magnitudes below 2^-119.
enum class Wire { kExact, kBfloat16, kInt8 };

std::size_t encoded_bytes(Wire wire, std::size_t element_bytes, std::size_t dim);  // of a row

// Rows table[which[i]], encoded one after the other.
template <class T>
void gather(std::byte* out, const T* table, std::span<const Index> which, std::size_t dim, Wire wire);
template <class T>
void encode(std::byte* out, const T* rows, std::size_t count, std::size_t dim, Wire wire);
template <class T>
void decode(T* out, const std::byte* rows, std::size_t count, std::size_t dim, Wire wire);

// Bag b has the elements begins[b] to begins[b + 1] - 1 of `which`, the last bag those to its end.
struct Bags {
  std::span<const Index> which;     // a row for each element
  std::span<const int64_t> begins;  // ascending, from 0, at most which.size()
  bool mean;                        // a bag's sum is divided by how many elements it has
};

template <class T>
void sum_bags(T* out, const T* rows, const Bags& bags, std::size_t dim);  // out [bags][dim]
// Adds to sums[which[i]] the gradient of the bag of i: sum_bags' derivative.
template <class T>
void spread_bags(T* sums, const T* gradients, const Bags& bags, std::size_t dim);

// sums[to[i]] += row i.
template <class T>
void add_encoded(T* sums, const std::byte* rows, std::span<const Index> to, std::size_t dim, Wire wire);

enum class Rule { kSgd, kAdagrad, kRowwiseAdagrad, kAdam };

// sgd: row -= rate·g. adagrad: sum += g², row -= rate·g / (√sum + eps). rowwise_adagrad: the same with one sum for the
// row, of the mean of g². adam: mean += (g - mean)(1 - beta1), square = beta2·square + (1 - beta2)g², row -= rate·mean
// / (√square + eps); its rate has the correction for the first steps.
struct Update {
  Rule rule;
  double rate;
  double eps = 0;
  double beta1 = 0;
  double beta2 = 0;
};

// An optimizer's state for each row of a table; null where it has none.
template <class T>
struct Memory {
  T* first = nullptr;   // adagrad: the sum, rowwise_adagrad: one number a row, adam: the mean
  T* second = nullptr;  // adam: the square
};

// Rows which[i], each given once, by the gradients `sums` [which.size()][dim].
template <class T>
void update(const Update& how, T* table, Memory<T> memory, std::span<const Index> which, const T* sums,
            std::size_t dim);

}  // namespace ringdp::rows
