// Kernels run as they are launched, on the memory that they are given.
#pragma once

#include <cstddef>

namespace emulated {

inline bool fail_next_launch = false;
inline std::size_t launches = 0;

}  // namespace emulated
