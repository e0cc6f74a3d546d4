// Residuals: the part of each parameter's gradient that compression has left out, to be added in the next step (error
// feedback). Each has two buffers: a backward reads the current one and writes the other, which becomes current only if the
// backward ended well. Their device keeps the index of the current one too, so that the host need not wait for it. They are
// kept by parameter of the module, so buckets may change.
// Owned by the Reducer, used under its lock; operations in flight keep their tensors.
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
    at::Tensor which;  // int32 [1], on the same device: the index of the current one

    at::Tensor current() const;  // waits for the device
    cuda::Feedback feedback() const;
  };
  using Flags =
      std::unordered_map<c10::Device, at::Tensor>;  // int32 [1] on that device: not 0 where something was not finite

  const Pair& of(std::size_t parameter, int64_t numel, c10::Device device);
  // Publishes the residuals written last for these parameters, unless the device flag reports a non-finite value. On a
  // device this is queued on the current stream.
  void commit(const std::vector<std::size_t>& parameters, const Flags& non_finite);
  void drop(std::size_t parameter) { pairs_.erase(parameter); }
  void clear() { pairs_.clear(); }

  // All residuals. `set` copies.
  const std::map<std::size_t, Pair>& all() const { return pairs_; }
  void set(std::size_t parameter, const at::Tensor& current);

 private:
  std::map<std::size_t, Pair> pairs_;
};

}  // namespace ringdp
