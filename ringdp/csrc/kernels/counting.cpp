#include "kernels/counting.h"

#include "kernels/table.h"

namespace ringdp {

thread_local CountedWork* CountedWork::here_ = nullptr;

namespace kernels {
namespace {

void count(uint64_t bytes) { CountedWork::here()->added(bytes); }

template <std::size_t kBytes>
struct Counting {
  static void combine(void*, const void*, const void*, std::size_t elements) { count(elements * kBytes); }
  static void divide(void*, std::size_t, std::size_t elements) { count(elements * kBytes); }
  static void mean(void*, const void*, const void*, std::size_t, std::size_t elements) { count(elements * kBytes); }
  static void load(float*, const void*, std::size_t elements) { count(elements * kBytes); }
  static void store(void*, const float*, float, std::size_t elements) { count(elements * kBytes); }
  static std::size_t first_non_finite(const void*, std::size_t elements) { return elements; }
  static void multiply(void*, double, std::size_t elements) { count(elements * kBytes); }
  static void weigh(void*, const void*, double, const void*, double, std::size_t, std::size_t elements) {
    count(elements * kBytes);
  }
};

template <class Function>
void replace(Function& there, Function by) {
  if (there != nullptr) there = by;
}

template <std::size_t kBytes>
void replace_row(KernelTable& table, std::size_t row) {
  using C = Counting<kBytes>;
  for (ReduceKernels& it : table.reduce[row]) {
    replace(it.combine, C::combine);
    replace(it.divide, C::divide);
    replace(it.mean, C::mean);
    replace(it.load, C::load);
    replace(it.accumulate, C::load);
    replace(it.store, C::store);
  }
  replace(table.first_non_finite[row], C::first_non_finite);
  replace(table.multiply[row], C::multiply);
  replace(table.weigh[row], C::weigh);
}

}  // namespace

const KernelTable& counting_table() {
  static const KernelTable made = [] {
    KernelTable table = scalar_table();
    for (std::size_t row = 0; row < kDTypeCount; ++row) {
      const std::size_t bytes = dtype_size(static_cast<DType>(row));
      if (bytes == 1) replace_row<1>(table, row);
      if (bytes == 2) replace_row<2>(table, row);
      if (bytes == 4) replace_row<4>(table, row);
      if (bytes == 8) replace_row<8>(table, row);
      if (bytes == 16) replace_row<16>(table, row);
    }
    return table;
  }();
  return made;
}

}  // namespace kernels
}  // namespace ringdp
