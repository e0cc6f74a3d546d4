// HookVerdicts: the reductions that are hooks and were used in one backward, whether each found its results finite,
// and the end of their step: the states that they have kept count if all was finite. Made at the end of backward by
// the thread that ends it, and used by that alone; `ask` and `commit` run Python code, without the Reducer's lock, the
// others under it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch/reducer/bucket_store.h"
#include "torch/reducer/reduction_assignment.h"
#include "torch/reducer/trainable_parameters.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

class HookVerdicts {
 public:
  HookVerdicts() = default;  // no hook was used
  // Those of the buckets sent in `step`.
  HookVerdicts(const ReductionAssignment& reductions, const BucketStore& buckets, int64_t step);

  bool none() const { return hooks_.empty(); }
  void ask();
  // Nothing for a reduction that is not among them, or does not know.
  std::optional<bool> of(const Reduction* reduction) const;
  void note_unused(const ReductionAssignment& reductions, const TrainableParameters& parameters, const UsedMap& used);
  void commit(bool finite) const;

 private:
  struct Hook {
    std::optional<bool> finite;
    std::vector<std::string> unused;  // its parameters that no rank used
  };

  std::map<HookReduction*, Hook> hooks_;
  std::vector<std::shared_ptr<Reduction>> alive_;  // they run Python code, which may give the reducer others
};

}  // namespace ringdp
