// Python exceptions in futures, which waits raise as the same object, in C++ and in Python. Any thread, GIL held.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>

namespace ringdp {

// For Future::setError: it can be thrown repeatedly, on any thread. GIL held; its destructor takes the GIL.
std::exception_ptr kept_error(const pybind11::object& exception);

}  // namespace ringdp
