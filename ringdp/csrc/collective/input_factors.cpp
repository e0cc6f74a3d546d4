#include "collective/input_factors.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace ringdp {

InputFactors::InputFactors(DType dtype, std::vector<double> of_members, int rank, int size)
    : of_members_(std::move(of_members)),
      rank_(rank),
      element_bytes_(dtype_size(dtype)),
      multiply_(multiply(dtype)),
      weigh_(weigh(dtype)) {
  if (!on()) return;
  if (multiply_ == nullptr)
    throw Error(ErrorKind::kValue, "all_reduce multiplies float32 and float64 tensors by factors, not " +
                                       std::string(dtype_name(dtype)) + " ones");
  if (of_members_.size() != static_cast<std::size_t>(size))
    throw Error(ErrorKind::kValue, "all_reduce needs a factor for each of the " + std::to_string(size) +
                                       " ranks, not " + std::to_string(of_members_.size()));
}

void InputFactors::multiply_own(std::span<std::byte> input) const {
  if (on() && of(rank_) != 1) multiply_(input.data(), of(rank_), input.size() / element_bytes_);
}

void InputFactors::combine(void* to, const void* a, int member_a, const void* b, int member_b, std::size_t divisor,
                           std::size_t count) const {
  const auto by = [&](int member) { return member < 0 ? 1.0 : of(member); };
  weigh_(to, a, by(member_a), b, by(member_b), divisor, count);
}

}  // namespace ringdp
