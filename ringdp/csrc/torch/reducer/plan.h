// Plan: the parameters whose gradients are averaged, how each is reduced, and which bucket it is in. Invariant: the
// parts are of the same parameters, and constant from the beginning of a step to its end. Between two steps parameters
// may be frozen or replaced and reductions changed; the caller then plans anew. Owned by the Reducer, used under its
// lock.
//
// TrainableParameters: all parameters of a module, and which of them required grad when the buckets were laid out. It
// detects parameters that were frozen or unfrozen since, and checks that all ranks agree. There are two numbers:
// `param_index` counts all parameters of the module, `parameter` those that require grad. Owned by the Reducer, used
// under its lock.
//
// ReductionAssignment: the reduction of each parameter and bucket. Buckets of an AutoReduction are exact until
// `choose` gives them another reduction, which lasts as long as the plan of buckets. Owned by the Reducer, used under
// its lock.
//
// Reduction: how the gradients of some parameters are reduced other than by an exact all-reduce. Owned by Python
// (reduction_bindings.cpp) and the reducers that use it. Any thread; methods that call into Python take the GIL
// themselves.
#pragma once

#include <ATen/core/Tensor.h>

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

namespace ringdp {

struct ModuleParameter {
  at::Tensor tensor;
  std::string name;
  std::string used_in;  // "block.linear (Linear)", several if it is tied
  bool sparse = false;
};

class TrainableParameters {
 public:
  explicit TrainableParameters(std::vector<ModuleParameter> parameters);

  const std::vector<ModuleParameter>& all() const { return all_; }
  // By tensor: its param_index, or -1.
  std::vector<int64_t> find(const std::vector<at::Tensor>& tensors) const;

  // Those that required grad at the last accept(), in the order of the module.
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  const std::vector<std::string>& names() const { return names_; }
  std::size_t size() const { return tensors_.size(); }
  std::size_t param_index(std::size_t parameter) const { return param_indices_[parameter]; }
  const ModuleParameter& operator[](std::size_t parameter) const { return all_[param_indices_[parameter]]; }
  // `position` counts those that required grad at construction; nullopt if this one does not any more.
  std::optional<std::size_t> since_construction(std::size_t position) const;

  // One pass over the tensors' flags: whether any was frozen or unfrozen since the last accept().
  bool changed() const;
  std::vector<std::size_t> frozen() const;  // param_indices of those that do not require grad any more
  // Exchanges the changes of all ranks. `left_over`: by param_index, whether this rank has a gradient that was not
  // averaged. Returns the frozen ones for which some rank has one. Throws on all ranks if they differ in
  // requires_grad.
  std::vector<std::size_t> agree_about_change(ReducerGroup& group, const std::vector<bool>& left_over) const;
  void accept();

 private:
  std::vector<std::size_t> flipped(bool now) const;
  std::string describe_change() const;
  void throw_where_they_differ(const std::vector<std::vector<uint8_t>>& ranks, int rank) const;

  std::vector<ModuleParameter> all_;
  std::vector<uint8_t> trains_;  // by param_index
  std::vector<std::size_t> at_construction_;
  std::vector<std::size_t> param_indices_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::string> names_;
};

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

// The treatment of a parameter without gradient at the end of backward.
enum class UnusedParameters {
  kFinish,  // zeros are sent for it, and one warning names it
  // the same without warning; its bucket may be launched as soon as the graph shows that no gradient will come
  kExpected,
  kForbidden  // DDP's error at the next forward
};

struct ReducerOptions {
  std::vector<std::size_t> caps_bytes;  // see assign_buckets
  UnusedParameters unused = UnusedParameters::kFinish;
  bool average = false;            // see ReducerGroup
  bool graph_shows_unused = true;  // false if parameters are not leaves of the graph: _autograd_hook reports them
  bool own_gradients = false;      // .grad is never a part of a bucket: copied in, and the mean copied back
  bool skip_unused = false;        // does not send buckets for which no rank has gradients
  bool host_control = false;       // see ReducerGroup
  bool gradient_pool = false;      // see GradientPool
  bool names_compared = false;     // see ReducerGroup
  bool weighted = false;           // see GradientWeights
  std::size_t report_every = 0;    // see StepReport
  bool alone = false;              // a single rank also reduces its buckets: for tests and benchmarks
  std::optional<c10::ScalarType> reduce_dtype;  // of the exact buckets; other gradients are cast to it and back
};

class Plan {
 public:
  // `all`: all of the module's parameters, also those that do not require grad now. The caller then calls start.
  Plan(std::vector<ModuleParameter> all, ReducerOptions given, const ReducerGroup& group);

  const ReducerOptions options;
  TrainableParameters parameters;
  BucketPlan buckets;
  ReductionAssignment reductions;
  StaticGraph graph;

  bool required() const { return options.unused == UnusedParameters::kForbidden; }  // every parameter's gradient
  // The type of a parameter's .grad, and of its bucket.
  c10::ScalarType gradient_dtype_of(std::size_t parameter) const;
  c10::ScalarType bucket_dtype_of(std::size_t parameter) const;
  // Whether some buckets may not be sent, now or once the order of the gradients is learned.
  bool may_skip() const;

  // Plans with the parameters that now require grad.
  void start();
  // Plans with changed reductions.
  void describe_again();
  // Plans with the order of rank 0, if there is a new one: whether the buckets have changed.
  std::optional<bool> follow_learned_order();
  // The order of arrival, which rank 0 sends to all, for the next plan, so that buckets fill up one after the other.
  void exchange_order(ReducerGroup& group, const std::vector<std::size_t>& arrivals,
                      const std::vector<bool>& used_somewhere, std::vector<int32_t>& order) const;
  // Ranks whose gradients of a parameter differ in type could not average them: throws if a parameter allows it.
  static void check_gradient_dtypes(const std::vector<ModuleParameter>& parameters);

 private:
  std::vector<PlannedGradient> describe() const;
};

}  // namespace ringdp
