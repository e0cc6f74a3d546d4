// Residuals: the part of each parameter's gradient that compression has left out, to be added in the next step (error
// feedback). Each has two buffers: a step reads the current one and writes the other, which becomes current only if
// the step counts. `commit` is the one place that decides this. They are kept by the parameter's name, so buckets may
// change. Owner and thread: a Reducer has one and uses it under its lock; in Python the states of compressors have one
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
      std::unordered_map<c10::Device, at::Tensor>;  // int32 [1] on that device: not 0 where something was not finite

  // The two buffers of one residual: float32 [numel] in the order of the gradient's memory, without loss scale, zeros
  // at first. Elements that nothing writes in any step (in two levels, those that this rank does not carry) stay zero.
  class Pair {
   public:
    at::Tensor current() const { return both_[index()]; }
    at::Tensor next() const { return both_[1 - index()]; }
    // For kernels, which read on their device which one is current: the host need not wait for that. `kept`: what they
    // need.
    cuda::Feedback feedback(std::vector<at::Tensor>& kept) const;

   private:
    friend class Residuals;
    enum class InStep { kUntouched, kWritten, kSent };

    std::size_t index() const;  // waits for the device if only that knows
    int32_t* which() const;

    std::array<at::Tensor, 2> both_;
    std::optional<std::size_t> index_ = 0;  // of the current one; nothing: a device has decided
    mutable at::Tensor which_;              // the same on the device: int32 [1], made when a kernel first needs it
    bool left_ = false;                     // a step that counts has written it, or `set`
    InStep in_step_ = InStep::kUntouched;
  };

  // The residual that a step has left; undefined where none has.
  at::Tensor current(const std::string& name) const;
  bool contains(const std::string& name) const { return pairs_.contains(name); }  // also one of zeros
  bool empty() const { return pairs_.empty(); }

  // This step reads the current one and writes all of the next one.
  const Pair& write(const std::string& name, int64_t numel, c10::Device device);
  // This step sends the current one with the exact gradient: if it counts, nothing is left. Undefined where there is
  // none.
  at::Tensor send(const std::string& name);
  // The step has ended, with nothing that was not finite as far as the host knows; `non_finite` are flags of the
  // devices that know more. What it has written is current, but for the parameters that no rank used. On a device this
  // is queued on the current stream.
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
