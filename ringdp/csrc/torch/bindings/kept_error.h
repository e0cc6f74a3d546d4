// Python exceptions that travel through futures: the same object comes out, in C++ as in Python. Any thread, GIL held.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>

namespace ringdp {

// For Future::setError: it can be thrown more than once, on any thread. GIL held; it is given back under the GIL.
std::exception_ptr kept_error(const pybind11::object& exception);

}  // namespace ringdp
