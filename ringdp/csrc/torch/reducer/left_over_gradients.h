// LeftOverGradients: which parameters have a gradient in .grad that was not averaged (no_sync, a backward past the
// wrapper), and its mean where none of the backwards to come will average it.
// Owned by the GradientLayout, used under the Reducer's lock.
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

  // The parameters are others; what is known of those that stay is kept.
  void start();
  // A gradient was added to its .grad and stays there, under no_sync or not; or its .grad is about to be averaged.
  void note(std::size_t parameter, bool under_no_sync);
  void averaged(std::size_t parameter);
  bool any() const { return count_.load(std::memory_order_relaxed) > 0; }  // any thread, without the lock
  // What `traffic` was when the first of them came, in ReducerGroup's bytes.
  void note_traffic(uint64_t traffic) { traffic_ = traffic; }
  uint64_t traffic() const { return traffic_; }

  struct Parameter {
    std::size_t param_index = 0;
    bool under_no_sync = false;
    bool changed = false;  // .grad was written since by something else, or is another tensor
    std::size_t bytes = 0;
  };
  std::vector<Parameter> list() const;  // those with a .grad
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
    bool under_no_sync = false;
    // .grad as it was left.
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
