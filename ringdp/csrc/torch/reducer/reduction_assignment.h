// ReductionAssignment: the reduction of each parameter and bucket. Buckets of an AutoReduction are exact until
// `choose` gives them another reduction, which lasts as long as the plan of buckets. Owned by the Reducer, used under
// its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/reduction.h"
#include "torch/reducer/trainable_parameters.h"

namespace ringdp {

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
