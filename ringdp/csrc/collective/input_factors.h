// InputFactors: the factors, one for each rank and known to all, by which the ranks' inputs of an all-reduce are
// multiplied before they are added. A ring multiplies both operands of its sums, which saves a pass over the memory;
// other algorithms multiply their own input when they start. Owned by the operation, used by the driving thread.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/types.h"
#include "kernels/kernels.h"

namespace ringdp {

class InputFactors {
 public:
  InputFactors() = default;
  // `of_members`: by group rank; empty: no multiplication. The factors are rounded to the tensor's type, float32 or
  // float64. Throws Error(kValue) for other types, and if their number is not `size`.
  InputFactors(DType dtype, std::vector<double> of_members, int rank, int size);

  bool on() const { return !of_members_.empty(); }
  double of(int member) const { return of_members_[static_cast<std::size_t>(member)]; }
  void multiply_own(std::span<std::byte> input) const;
  // The mean of two operands, of which each is a member's input times its factor, or (`member` -1) a sum already.
  void combine(void* to, const void* a, int member_a, const void* b, int member_b, std::size_t divisor,
               std::size_t count) const;

 private:
  std::vector<double> of_members_;
  int rank_ = 0;
  std::size_t element_bytes_ = 1;
  Multiply multiply_ = nullptr;
  Weigh weigh_ = nullptr;
};

}  // namespace ringdp
