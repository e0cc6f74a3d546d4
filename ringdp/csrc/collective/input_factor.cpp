#include "collective/input_factor.h"

#include <string>

#include "base/error.h"

namespace ringdp {
namespace {

template <class T>
void multiply_elements(std::span<std::byte> input, double factor) {
  auto* const x = reinterpret_cast<T*>(input.data());
  const auto by = static_cast<T>(factor);
  const std::size_t count = input.size() / sizeof(T);
  for (std::size_t i = 0; i < count; ++i) x[i] *= by;
}

}  // namespace

InputFactor::InputFactor(DType dtype, double factor) : dtype_(dtype), factor_(factor) {
  if (on() && dtype != DType::kFloat32 && dtype != DType::kFloat64)
    throw Error(ErrorKind::kValue, "all_reduce multiplies float32 and float64 tensors by a factor, not " +
                                       std::string(dtype_name(dtype)) + " ones");
}

void InputFactor::multiply(std::span<std::byte> input) const {
  dtype_ == DType::kFloat32 ? multiply_elements<float>(input, factor_) : multiply_elements<double>(input, factor_);
}

}  // namespace ringdp
