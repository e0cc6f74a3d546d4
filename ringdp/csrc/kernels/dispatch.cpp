// Chooses the instruction set and looks kernels up.
#include <atomic>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/error.h"
#include "kernels/counting.h"
#include "kernels/kernels.h"
#include "kernels/table.h"

namespace ringdp {
namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows "f16c".
bool cpu_has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
bool cpu_has_avx2() { return __builtin_cpu_supports("avx2") && cpu_has_f16c(); }

bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }
#endif

bool available(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return cpu_has_avx2();
    case Isa::kAvx512:
      return cpu_has_avx512();
  }
  return false;
}

const kernels::KernelTable* table_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return kernels::avx2_table();
    case Isa::kAvx512:
      return kernels::avx512_table();
    case Isa::kScalar:
      break;
  }
  return &kernels::scalar_table();
}

struct Selection {
  Selection() : isa(best_isa()), table(table_of(isa)) {}
  std::atomic<Isa> isa;
  std::atomic<const kernels::KernelTable*> table;
};

Selection& selection() {
  static Selection chosen;
  return chosen;
}

const kernels::KernelTable& current_table() {
  return CountedWork::here() != nullptr ? kernels::counting_table()
                                        : *selection().table.load(std::memory_order_relaxed);
}

const ReduceKernels& find(const kernels::KernelTable& table, DType dtype, ReduceOp op) {
  const auto row = static_cast<std::size_t>(dtype);
  const auto column = static_cast<std::size_t>(op);
  if (row < table.reduce.size() && column < table.reduce[row].size() && table.reduce[row][column].combine != nullptr)
    return table.reduce[row][column];
  throw Error(ErrorKind::kValue,
              std::string(reduce_op_name(op)) + " is not defined for " + std::string(dtype_name(dtype)) + " tensors");
}

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

Isa best_isa() {
  static const Isa best = available(Isa::kAvx512) ? Isa::kAvx512 : available(Isa::kAvx2) ? Isa::kAvx2 : Isa::kScalar;
  return best;
}

Isa current_isa() { return selection().isa.load(std::memory_order_relaxed); }

void select_isa(Isa isa) {
  if (!available(isa))
    throw Error(ErrorKind::kValue,
                "this CPU has no " + std::string(isa_name(isa)) + "; it has " + std::string(isa_name(best_isa())));
  selection().isa.store(isa, std::memory_order_relaxed);
  selection().table.store(table_of(isa), std::memory_order_relaxed);
}

bool reduction_supported(DType dtype, ReduceOp op) {
  const kernels::KernelTable& table = kernels::scalar_table();
  const auto row = static_cast<std::size_t>(dtype);
  const auto column = static_cast<std::size_t>(op);
  return row < table.reduce.size() && column < table.reduce[row].size() && table.reduce[row][column].combine != nullptr;
}

const ReduceKernels& reduce_kernels(DType dtype, ReduceOp op) { return find(current_table(), dtype, op); }

FirstNonFinite first_non_finite(DType dtype) {
  return current_table().first_non_finite[static_cast<std::size_t>(dtype)];
}

Multiply multiply(DType dtype) { return current_table().multiply[static_cast<std::size_t>(dtype)]; }

Weigh weigh(DType dtype) { return current_table().weigh[static_cast<std::size_t>(dtype)]; }

}  // namespace ringdp
