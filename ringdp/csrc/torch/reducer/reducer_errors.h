// Errors of buckets: adds the bucket's number and parameter names to any exception that an operation throws, and keeps the
// first one.
// Used by the Reducer, on the threads that run backward, without the GIL; it takes the GIL for Python exceptions.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace ringdp {

// Call inside a catch block. A ringdp::Error becomes its Python exception, because autograd keeps only those whole on the
// way out of backward(); torch's errors keep their type; a Python exception passes unchanged.
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

// FailureRecord: what made a reducer give up. Owned by the Reducer, used under its lock.
class FailureRecord {
 public:
  // The first one counts.
  void keep(std::string text) {
    if (failed_.empty()) failed_ = std::move(text);
  }
  void throw_if_failed(int64_t step) const;
  void clear() { failed_.clear(); }

  // For DDP's logging data: the text of the last thing that the reducer threw, and of what a backward ended with.
  void note_thrown(std::string text) { thrown_ = std::move(text); }
  const std::string& thrown() const { return thrown_; }

 private:
  std::string failed_;
  std::string thrown_;
};

}  // namespace ringdp
