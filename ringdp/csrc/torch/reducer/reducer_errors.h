// Errors of buckets: adds the bucket's number and parameter names to any exception that an operation throws.
// Used by the Reducer, on the threads that run backward, without the GIL; it takes the GIL for Python exceptions.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace ringdp {

// Call inside a catch block. A ringdp::Error becomes its Python exception, because backward() preserves only those;
// torch's errors keep their type; a Python exception passes unchanged.
[[noreturn]] void rethrow_from_bucket(int64_t bucket, const std::string& name, int64_t step);

template <class Action>
void in_bucket(int64_t bucket, const std::string& name, int64_t step, Action&& action) {
  try {
    std::forward<Action>(action)();
  } catch (...) {
    rethrow_from_bucket(bucket, name, step);
  }
}

// The text of the exception being handled.
std::string current_error_text();

}  // namespace ringdp
