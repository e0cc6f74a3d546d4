// What runs at the end of a backward warns through Python's warnings on every device. A backward of tensors on a device ends
// in a thread of autograd's, in which torch prints a warning to stderr, where no filter and no test sees it.
#pragma once

#include <torch/csrc/Exceptions.h>

namespace ringdp {

// Without the GIL. Rethrows what `body` throws; a warning that a filter makes an error is thrown as one.
template <class Body>
void with_python_warnings(const Body& body) {
  torch::PyWarningHandler warnings;
  try {
    body();
  } catch (...) {
    warnings.set_in_exception();
    throw;
  }
}

}  // namespace ringdp
