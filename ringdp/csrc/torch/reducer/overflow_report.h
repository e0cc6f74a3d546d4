// OverflowReport: whether a backward gave infinities or NaNs. Most operations look for them while they reduce; the
// report combines their findings, and checks the other results itself. Findings on a device stay there, in a flag,
// until they are read, so that a step does not wait. Owned by the Reducer, used under its lock.
//
// HookVerdicts: the hook reductions of one backward, whether each found its results finite, and their commit: their
// states count if all results were finite. Made at the end of backward by the thread that ends it, and used by that
// alone; `ask` and `commit` run Python code, without the Reducer's lock, the others under it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch/reducer/bucket_store.h"
#include "torch/reducer/reduction_assignment.h"
#include "torch/reducer/residuals.h"
#include "torch/reducer/trainable_parameters.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

class HookVerdicts {
 public:
  HookVerdicts() = default;  // no hook was used
  // The hooks of the buckets sent in `step`.
  HookVerdicts(const ReductionAssignment& reductions, const BucketStore& buckets, int64_t step);

  bool none() const { return hooks_.empty(); }
  void ask();
  // nullopt for another reduction, or one without a verdict.
  std::optional<bool> of(const Reduction* reduction) const;
  void note_unused(const ReductionAssignment& reductions, const TrainableParameters& parameters, const UsedMap& used);
  void commit(bool finite) const;

 private:
  struct Hook {
    std::optional<bool> finite;
    std::vector<std::string> unused;  // its parameters that no rank used
  };

  std::map<HookReduction*, Hook> hooks_;
  std::vector<std::shared_ptr<Reduction>> alive_;  // they run Python code, which may replace the reducer's
};

class OverflowReport {
 public:
  struct Flag {
    at::Tensor seen;  // int32 [1]: not 0 where something was not finite
    c10::Stream made_on;
  };

  explicit OverflowReport(const TrainableParameters& parameters) : parameters_(parameters) {}

  // Enabled by the program, and by compression, whose residuals count only if all gradients are finite.
  void watch(bool watching) { watching_ = watching; }
  void watch_for_compression(bool compressed) { compressed_ = compressed; }
  bool watches() const { return watching_ || compressed_; }

  void begin_backward();
  // This backward's flag on a device, for kernels that look for non-finite values.
  const Flag& flag_on(c10::Device device);
  // The buckets sent in `step` are reduced. `look_at_results`: also checks results that no operation has checked.
  void collect(const BucketStore& buckets, int64_t step, const HookVerdicts& hooks, bool look_at_results);

  // Whether the last synchronised backward gave finite gradients, the same on all ranks; nullopt if it was not
  // checked. Waits for the devices that have flags.
  std::optional<bool> finite();
  // The same without the flags.
  std::optional<bool> finite_on_host() const { return finite_; }
  Residuals::Flags flags() const;
  // The first parameter of the module whose gradient on this rank was not finite in that backward; -1: none.
  int64_t own_non_finite() const { return own_non_finite_; }
  // Parameters of the module whose .grad is not finite; checks all of them.
  std::vector<std::size_t> non_finite() const;

 private:
  std::optional<bool> look_at(const Bucket& bucket);
  bool flag_result(const at::Tensor& result);
  int64_t parameter_at(const Bucket& bucket, const std::byte* address) const;

  const TrainableParameters& parameters_;
  bool watching_ = false;
  bool compressed_ = false;
  std::optional<bool> finite_;  // without the flags
  std::unordered_map<c10::Device, Flag> flags_;
  int64_t own_non_finite_ = -1;
};

}  // namespace ringdp
