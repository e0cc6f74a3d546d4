// LeftOverGradients: which parameters have a gradient in .grad that was not averaged (no_sync), and its mean where none of the
// backwards to come will average it.
// Owned by the GradientLayout, used under the Reducer's lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "torch/reducer/bucket.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/trainable_parameters.h"

namespace ringdp {

class LeftOverGradients {
 public:
  LeftOverGradients(const TrainableParameters& parameters, const BucketPlan& plan)
      : parameters_(parameters), plan_(plan) {}

  // The parameters are others; what is known of those that stay is kept.
  void start();
  void note(std::size_t parameter, bool left_over) { slots_[parameter].left_over = left_over; }
  std::vector<bool> by_param_index() const;
  bool none() const;
  void forget();  // gradients were zeroed
  // .grad times `factor` in a flat buffer of that type, to be averaged.
  Bucket flat(std::size_t parameter, c10::ScalarType dtype, double factor) const;
  // .grad becomes what is in the buffer.
  void accept(std::size_t parameter, const Bucket& bucket);

 private:
  struct Slot {
    at::Tensor parameter;
    bool left_over = false;
  };

  const TrainableParameters& parameters_;
  const BucketPlan& plan_;
  std::vector<Slot> slots_;  // by parameter
};

}  // namespace ringdp
