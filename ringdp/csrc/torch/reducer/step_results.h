// OverflowReport: whether a backward gave infinities or NaNs. Most operations look for them while they reduce; the
// report combines their findings, and checks the other results itself. Findings on a device stay there, in a flag,
// until they are read, so that a step does not wait. Owned by the Reducer, used under its lock.
//
// HookVerdicts: the hook reductions of one backward, whether each found its results finite, and their commit: their
// states count if all results were finite. Made at the end of backward by the thread that ends it, and used by that
// alone; `ask` and `commit` run Python code, without the Reducer's lock, the others under it.
//
// UsedMap: the parameters that were used in a backward, by this rank and by any rank. The ranks' marks are sent behind
// the gradients of the last bucket, and summed with them; if no bucket can have them they are an operation of their
// own. A parameter that no rank used keeps its .grad; one warning names those without gradient. Owned by the Step, used
// under the Reducer's lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>
#include <vector>

#include "torch/reducer/bucket_store.h"
#include "torch/reducer/gradient_compression.h"
#include "torch/reducer/plan.h"
#include "torch/reducer/reducer_group.h"

namespace ringdp {

// What UsedMaps keep from one step to the next. Owned by the Exchange, used under the Reducer's lock.
struct UsedHistory {
  c10::intrusive_ptr<c10d::Work> before;  // the last step's operation, if that step has not waited for it
  bool warned = false;
  bool ranks_named = false;  // whether the warning was given; the same on all ranks
};

class UsedMap {
 public:
  UsedMap(const Plan& plan, const Arrivals& arrivals, ReducerGroup& group, UsedHistory& history)
      : plan_(plan), parameters_(plan.parameters), arrivals_(arrivals), group_(group), history_(history) {}

  // This rank's part of the map, into a bucket's `marks` [parameters + 1]: 1 for parameters with gradient; the last
  // element is 1 where one lacks a gradient.
  void write(const at::Tensor& marks) const;
  // The same as an operation of its own, whose name ends in `note`.
  void launch(const std::string& note = {});
  // The last bucket has been reduced. `wanted`: the map is needed; otherwise it is read only at intervals, because
  // that waits for the device. `marks` are that bucket's, undefined if it has none.
  void read(const at::Tensor& marks, bool wanted, int64_t step, bool joining);
  void wait() const {
    if (work_) work_->wait();
  }
  void drop_operations() { work_ = history_.before = nullptr; }

  bool used_somewhere(std::size_t parameter) const {
    return arrivals_.used(parameter) || somewhere_.empty() || somewhere_[parameter];
  }
  const std::vector<bool>& somewhere() const { return somewhere_; }  // by parameter; empty: it was not read

  // Warns once about `missing`, this rank's parameters without gradient. The ranks exchange once which of them each
  // lacks.
  void warn(const std::vector<std::size_t>& missing, int64_t step, bool joining);

 private:
  bool warns() const { return plan_.options.unused == UnusedParameters::kFinish && !plan_.graph.on; }
  bool looks_for_others(int64_t step, bool joining) const;
  void read_now(const at::Tensor& marks);

  const Plan& plan_;
  const TrainableParameters& parameters_;
  const Arrivals& arrivals_;
  ReducerGroup& group_;
  UsedHistory& history_;
  at::Tensor map_;  // if it is an operation of its own: int32 [parameters + 1]
  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<bool> somewhere_;
  bool some_rank_lacks_ = false;  // some rank has no gradient for some parameter
};

// A rank that has run out of input (join) repeats the operation of the others: it has used nothing, and lacks nothing.
void shadow_used_map(const TrainableParameters& parameters, ReducerGroup& group, UsedHistory& history);

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
