#include "collective/input_factor.h"

#include <string>

#include "base/error.h"

namespace ringdp {

InputFactor::InputFactor(DType dtype, double factor)
    : factor_(factor), element_bytes_(dtype_size(dtype)), multiply_(multiply(dtype)) {
  if (on() && multiply_ == nullptr)
    throw Error(ErrorKind::kValue, "all_reduce multiplies float32 and float64 tensors by a factor, not " +
                                       std::string(dtype_name(dtype)) + " ones");
}

}  // namespace ringdp
