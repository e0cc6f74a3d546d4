// HookVerdicts: the hook reductions of one backward, whether each found its results finite, and their commit: their
// states count if all results were finite. Made at the end of backward by the thread that ends it, and used by that
// alone; `ask` and `commit` run Python code, without the Reducer's lock, the others under it.
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

}  // namespace ringdp
