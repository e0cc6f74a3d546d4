// Buckets: the memory of the gradients, from autograd's hook to the mean in .grad. Invariant: hooks and slots are those
// of the plan's parameters; there are no buckets, or one for each of the plan's. Owned by the Reducer, used under its
// lock, except the hooks, which autograd calls.
//
// LeftOverGradients: the parameters with a gradient in .grad that was not averaged (no_sync, a backward past the
// wrapper), and its mean if no later backward will average it. Owned by the Buckets, used under the Reducer's
// lock.
//
// StepRepair: keeps what a repeated step needs after the loss of a member, in elastic jobs (engine/elastic_group.h):
// the gradients of each bucket before it was sent. The means are written to a second memory of the bucket, and the two
// are swapped when the step counts; so no gradient is copied, unless the program may have the address of the first.
// Without such a group it does nothing. Owned by the Buckets, used under the Reducer's
// lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/elastic_group.h"
#include "torch/backend/backward_unit.h"
#include "torch/device/gradient_pool.h"
#include "torch/reducer/bucket.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/bucket_store.h"
#include "torch/reducer/exchange.h"
#include "torch/reducer/gradient_hooks.h"
#include "torch/reducer/plan.h"

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

class StepRepair {
 public:
  StepRepair(Exchange& exchange, BucketStore& store);

  bool on() const { return elastic_ != nullptr; }
  BackwardUnit& backward() const { return *backward_; }

  void follow_members();  // any time: updates the group's ranks and dependent state to the present view
  // Between two steps: runs `body`, which calls operations on the group, and repeats it after the loss of a member.
  void as_unit(const std::string& what, const std::function<void()>& body);
  void begin_step();
  // The buckets of this step cannot be sent in its view: all are sent at its end.
  void withhold() { withholds_ = withheld_ = true; }
  // Called before the bucket is sent. False: it is sent at the end of the step, with all others, as on all ranks.
  bool keep(Bucket& bucket);
  uint64_t view() const { return view_; }  // in which the present or last step was sent; 0: not elastic
  // Whether a bucket was not sent, or was sent in an earlier view.
  bool must_send_again() const { return withheld_ || view_ != elastic_->view(); }
  // Waits for the old operations; then all kept buckets can be sent again, to the members of the present view.
  void restore();
  // The step counts: swaps the means into the buckets.
  void accept();

 private:
  struct Kept {
    at::Tensor spare;  // the bucket's second memory, or a copy of its gradients
    bool copied = false;
    bool filled = false;  // in this step
  };

  Exchange& exchange_;
  BucketStore& store_;
  std::shared_ptr<ElasticGroup> elastic_;   // the process group's; null: not elastic
  std::shared_ptr<BackwardUnit> backward_;  // likewise
  std::vector<Kept> kept_;                  // by bucket
  uint64_t view_ = 0;
  bool withholds_ = false;
  bool withheld_ = false;
};

class Buckets {
 public:
  Buckets(Plan& plan, Exchange& exchange, GradientListener& listener);

  const GradientPool pool;
  GradientHooks hooks;
  BucketStore store;
  LeftOverGradients left_over;
  StepRepair repair;

  // Hooks are attached, and there are parameters.
  bool watched() const { return hooks.attached() && plan_.parameters.size() > 0; }
  // Whether the map of used parameters is an operation of its own.
  bool sends_used_map() const;

  // ---- Between two steps: the plan's parameters, its reductions, or the order of its gradients are other ones.
  void start();
  void lay_out_again();
  bool follow_learned_order();  // whether there was a new one
  void attach();
  void choose(const std::vector<int>& reduction_of_bucket);
  // Buckets get their memory at the first forward that needs it, not at construction: a hook may still be registered,
  // and evaluation needs none.
  void allocate();
  // Averages what micro-batches have left in the .grads of these parameters of the module; the optimizer may apply it.
  void average_left_over(const std::vector<std::size_t>& due, std::vector<std::pair<std::size_t, Bucket>>& means);

 private:
  void set_dtypes();
  void assign_reductions();

  Plan& plan_;
  Exchange& exchange_;
};

}  // namespace ringdp
