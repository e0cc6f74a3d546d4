// What compression has left out of each parameter's gradient, to be added the next time (error feedback).
// Two buffers of a kind: a backward reads the one that counts and writes the other, which counts only when it has ended
// well. Which one counts lies beside them, so on a device nobody has to wait to know. By watched parameter, so buckets may
// change. Owned by the Reducer, used under its lock; operations in flight keep their tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <map>
#include <unordered_map>
#include <vector>

#include "cuda/kernels.h"

namespace ringdp {

class Residuals {
 public:
  struct Pair {
    std::array<at::Tensor, 2>
        both;          // float32 [numel] on the parameter's device, in the order of the gradient's memory,
                       // without loss scale; zeros at first. In two levels only the parts that this rank
                       // carries are ever written
    at::Tensor which;  // int32 [1], there: the one that counts

    at::Tensor current() const;  // waits for the device
    cuda::Feedback feedback() const;
  };
  using Flags =
      std::unordered_map<c10::Device, at::Tensor>;  // int32 [1] on that device: not 0 where something was not finite

  const Pair& of(std::size_t parameter, int64_t numel, c10::Device device);
  // Of these parameters what was written last counts, unless a flag says otherwise. Memory on a device: on the current stream.
  void commit(const std::vector<std::size_t>& parameters, const Flags& non_finite);
  void drop(std::size_t parameter) { pairs_.erase(parameter); }
  void clear() { pairs_.clear(); }

  // Those there are. `set` copies.
  const std::map<std::size_t, Pair>& all() const { return pairs_; }
  void set(std::size_t parameter, const at::Tensor& current);

 private:
  std::map<std::size_t, Pair> pairs_;
};

}  // namespace ringdp
