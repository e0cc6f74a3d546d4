// Residuals: the part of each parameter's gradient that compression has left out, to be added in the next step (error
// feedback). Each has two buffers: a step reads the current one and writes the other, which becomes current only if
// the step counts. Only `commit` decides this. They are stored by the parameter's name, so buckets may change. Owner
// and thread: a Reducer has one and uses it under its lock; in Python the states of compressors have one
// (compression/exchange/states.py), whose calls hold the GIL. Operations in flight keep the tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cuda/kernels.h"

namespace ringdp {

class Residuals {
 public:
  using Names = std::unordered_set<std::string>;
  using Flags =
      std::unordered_map<c10::Device, at::Tensor>;  // int32 [1] on that device: not 0: an element was not finite

  // The two buffers of one residual: float32 [numel] in the order of the gradient's memory, without loss scale, zeros
  // at first. Elements that are never written (in two levels, those that this rank does not carry) stay zero.
  class Pair {
   public:
    at::Tensor current() const { return both_[index()]; }
    at::Tensor next() const { return both_[1 - index()]; }
    // For kernels, which read the index on their device, so that the host need not wait for it. `kept`: receives the
    // memory that they use.
    cuda::Feedback feedback(std::vector<at::Tensor>& kept) const;

   private:
    friend class Residuals;
    enum class InStep { kUntouched, kWritten, kSent };

    std::size_t index() const;  // waits for the device if only that has it
    int32_t* which() const;

    std::array<at::Tensor, 2> both_;
    std::optional<std::size_t> index_ = 0;  // of the current one; nullopt: a device has decided
    mutable at::Tensor which_;              // the index on the device: int32 [1], made for the first kernel
    bool left_ = false;                     // a step that counts has written it, or `set`
    InStep in_step_ = InStep::kUntouched;
  };

  // The current residual; undefined if no step has left one.
  at::Tensor current(const std::string& name) const;
  bool contains(const std::string& name) const { return pairs_.contains(name); }  // true for zeros, too
  bool empty() const { return pairs_.empty(); }

  // For a step that reads the current one and writes all of the next one.
  const Pair& write(const std::string& name, int64_t numel, c10::Device device);
  // For a step that sends the current one with the exact gradient: if it counts, no residual is left. Undefined if
  // there is none.
  at::Tensor send(const std::string& name);
  // The step has ended, finite as far as the host checked; `non_finite` are the flags of devices. Its residuals become
  // current, except those of parameters that no rank used. On a device this is queued on the current stream.
  void commit(const Flags& non_finite, const Names& unused);
  // The step does not count.
  void drop_step();

  void set(const std::string& name, const at::Tensor& current);  // copies
  void drop(const std::string& name) { pairs_.erase(name); }
  void clear() { pairs_.clear(); }

 private:
  std::map<std::string, Pair> pairs_;
};

}  // namespace ringdp
