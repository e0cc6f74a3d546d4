// What compression has left out of each parameter's gradient, to be added the next time (error feedback).
// Two of a kind: a backward reads `current` and writes `next`, which counts only when it has ended well. By watched
// parameter, so buckets may change. Owned by the Reducer, used under its lock; operations in flight keep their tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>

namespace ringdp {

class Residuals {
 public:
  struct Pair {
    at::Tensor current;  // float32 [numel], in the order of the gradient's memory, without loss scale; zeros at first
    at::Tensor next;     // the same; in two levels only the parts that this rank carries are ever written
  };

  const Pair& of(std::size_t parameter, int64_t numel);
  void commit(std::size_t parameter);  // next becomes current
  void drop(std::size_t parameter) { pairs_.erase(parameter); }
  void clear() { pairs_.clear(); }

  // Those there are. `set` copies.
  const std::map<std::size_t, Pair>& all() const { return pairs_; }
  void set(std::size_t parameter, const at::Tensor& current);

 private:
  std::map<std::size_t, Pair> pairs_;
};

}  // namespace ringdp
