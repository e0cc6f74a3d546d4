// ReductionAssignment: the reduction of each parameter and bucket. Buckets of an AutoReduction are exact until
// `choose` gives them another reduction, which lasts as long as the plan of buckets. Owned by the Reducer, used under
// its lock.
//
// Reduction: how the gradients of some parameters are reduced other than by an exact all-reduce. Owned by Python
// (reduction_bindings.cpp) and the reducers that use it. Any thread; methods that call into Python take the GIL
// themselves.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/trainable_parameters.h"

namespace ringdp {

class Reduction {
 public:
  explicit Reduction(std::string name) : name_(std::move(name)) {}
  virtual ~Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  const std::string& name() const { return name_; }
  // Disabled: the same buckets are reduced exactly. Set between steps, on all ranks alike.
  bool enabled() const { return enabled_; }
  void set_enabled(bool enabled) { enabled_ = enabled; }

 private:
  const std::string name_;
  std::atomic<bool> enabled_{true};
};

// One of the core's codecs. See collective/compressed.h.
class CodecReduction final : public Reduction {
 public:
  CodecReduction(CodecId codec, bool feedback)
      : Reduction(std::string(ringdp::codec(codec).name)), codec_(codec), feedback_(feedback) {}

  CodecId codec() const { return codec_; }
  bool feedback() const { return feedback_; }

 private:
  const CodecId codec_;
  const bool feedback_;
};

// Reduces exactly, except buckets to which Reducer::choose gave another of the plan's reductions. With `feedback` some
// of those keep residuals, which are added to the gradients of the next exact step.
class AutoReduction final : public Reduction {
 public:
  explicit AutoReduction(bool feedback) : Reduction("chosen by bucket"), feedback_(feedback) {}

  bool feedback() const { return feedback_; }

 private:
  const bool feedback_;
};

inline bool is_auto(const Reduction* reduction) { return dynamic_cast<const AutoReduction*>(reduction) != nullptr; }

// A communication hook for these parameters' buckets only.
class HookReduction : public Reduction {
 public:
  using Reduction::Reduction;

  virtual c10d::CommHookInterface& hook() = 0;
  // Whether all results of this backward were finite, the same on all ranks; nullopt if the reduction does not check.
  virtual std::optional<bool> finite() = 0;
  // A backward has ended. The reduction's new states count only if all results were finite, and not for parameters
  // that no rank used.
  virtual void commit(bool finite, const std::vector<std::string>& unused) = 0;
  // The number of ranks with input (torch's Join); 0: all of them.
  virtual void set_divisor(int64_t divisor) = 0;
};

// The reductions of parameters that are not reduced exactly; the vectors are indexed by parameter of the module.
struct ReductionPlan {
  std::vector<std::shared_ptr<Reduction>> reductions;
  std::vector<int> reduction_of;        // -1: exact
  std::vector<uint32_t> owner_offsets;  // which rank owns which part of a parameter: CompressedSection::owner_offset
  bool exchange_codes = false;          // codes go over c10d (c10d_compressed_all_reduce.h); the same on all ranks
};

class ReductionAssignment {
 public:
  ReductionAssignment(const TrainableParameters& parameters, const BucketPlan& plan, const ReducerGroup& group)
      : parameters_(parameters), plan_(plan), group_(group) {}

  // Throws Error(kValue) for reductions that do not match the parameters, or codecs without support for their devices.
  void check(const ReductionPlan& reductions) const;
  // Returns the old ones, to be released without the lock.
  ReductionPlan replace(ReductionPlan reductions);
  const ReductionPlan& all() const { return reductions_; }
  bool none() const { return reductions_.reductions.empty(); }

  // Null: exact, as sparse, integer and complex gradients always are.
  Reduction* of_parameter(std::size_t param_index) const;
  int number_of_parameter(std::size_t param_index) const { return reductions_.reduction_of[param_index]; }
  uint32_t owner_offset(std::size_t param_index) const { return reductions_.owner_offsets[param_index]; }

  // By bucket of the plan: one of the reductions in place of AutoReduction, or -1; lasts until the next plan of
  // buckets.
  void choose(const std::vector<int>& reduction_of_bucket);
  void forget_choice() { chosen_.clear(); }
  bool free(std::size_t bucket) const;             // `choose` may give it another
  int number_of_bucket(std::size_t bucket) const;  // -1: exact
  // The bucket has a codec, but is too small for codes (AlgorithmTable::exact_bucket_bytes): it is exact, with the
  // residuals of earlier codes.
  bool too_small(std::size_t bucket) const;
  Reduction* of_bucket(std::size_t bucket) const;  // an AutoReduction before `choose`

  // Of hook reductions: whether they may issue operations after the last bucket was launched.
  bool calls_back() const;
  void set_divisor(int64_t divisor) const;

 private:
  const TrainableParameters& parameters_;
  const BucketPlan& plan_;
  const ReducerGroup& group_;
  ReductionPlan reductions_;
  std::vector<int> chosen_;  // see choose; empty: none
};

}  // namespace ringdp
