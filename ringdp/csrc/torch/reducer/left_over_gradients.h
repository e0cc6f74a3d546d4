// LeftOverGradients: the parameters with a gradient in .grad that was not averaged (no_sync, a backward past the
// wrapper), and its mean if no later backward will average it. Owned by the GradientLayout, used under the Reducer's
// lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "torch/reducer/bucket.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/trainable_parameters.h"

namespace ringdp {

class LeftOverGradients {
 public:
  LeftOverGradients(const TrainableParameters& parameters, const BucketPlan& plan)
      : parameters_(parameters), plan_(plan) {}

  // New parameters; keeps the state of those that stay.
  void start();
  // A gradient was added to its .grad without averaging, under no_sync or not; or its .grad will be averaged.
  void note(std::size_t parameter, bool under_no_sync);
  void averaged(std::size_t parameter);
  bool any() const { return count_.load(std::memory_order_relaxed) > 0; }  // any thread, without the lock
  // The value of `traffic` (ReducerGroup's bytes) when the first of them came.
  void note_traffic(uint64_t traffic) { traffic_ = traffic; }
  uint64_t traffic() const { return traffic_; }

  struct Parameter {
    std::size_t param_index = 0;
    bool under_no_sync = false;
    bool changed = false;  // .grad was written since, or replaced
    std::size_t bytes = 0;
  };
  std::vector<Parameter> list() const;  // those with a .grad
  std::vector<bool> by_param_index() const;
  bool none() const;
  void forget();  // after gradients were zeroed
  // .grad times `factor` in a flat buffer of that type, to be averaged.
  Bucket flat(std::size_t parameter, c10::ScalarType dtype, double factor) const;
  // Copies the buffer to .grad.
  void accept(std::size_t parameter, const Bucket& bucket);

 private:
  struct Slot {
    at::Tensor parameter;
    bool left_over = false;
    bool under_no_sync = false;
    // Identifies the left .grad.
    const c10::TensorImpl* grad = nullptr;
    int64_t version = 0;
  };

  void count_again();

  const TrainableParameters& parameters_;
  const BucketPlan& plan_;
  std::vector<Slot> slots_;  // by parameter
  std::atomic<std::size_t> count_{0};
  uint64_t traffic_ = 0;
};

}  // namespace ringdp
