// GradientWeights: gradients are averaged over samples, not over ranks: each rank's counts as often as its batch
// weighs (MicroBatches has the formula). The ranks tell each other their weights in an operation of 16 bytes for each,
// which begins in the forward and is read when the backward begins. Owned by the Reducer's GradientLayout, used under
// the Reducer's lock by the forward's thread and the threads that run backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch/reducer/micro_batches.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/trainable_parameters.h"

namespace ringdp {

// By what gradients are multiplied; 1: they stay as they are, 0: they become zeros, whatever they are.
struct GradientFactors {
  double incoming = 1;           // a gradient of the backward under way, before it is added to .grad
  double outgoing = 1;           // the .grad that is sent; with one rank, the .grad that stays
  std::vector<double> of_ranks;  // `outgoing` of each rank; empty: all are 1
  bool when_sent = false;  // `outgoing` is 1, and a bucket is multiplied where it is sent: its gradients may go again
};

class GradientWeights {
 public:
  // `on`: false: every rank counts the same, and nothing is exchanged or multiplied.
  GradientWeights(ReducerGroup& group, const TrainableParameters& parameters, bool on)
      : group_(group), parameters_(parameters), on_(on) {}
  bool on() const { return on_; }

  // ---- Forward. The weight of this forward's backward. `sync`: that backward averages, and the ranks begin to tell
  // each other what they have. A weight that is negative or not finite is an error on all ranks. `discarded`: no .grad
  // has anything of earlier backwards.
  void announce(double weight, bool sync, bool discarded, const std::string& note = {});
  // The forwards up to the end of the step are of the batch whose forward has failed: what it announced stands.
  void repeat() {
    repeats_ = true;
    if (announced_) done_.refer_to(announced_->own.reference);
  }
  double of_forward() const { return of_forward_; }
  // On a rank that has run out of input (join).
  void shadow();

  // ---- Backward. `task`: autograd's number of it, `weight`: of the forward whose output it has reached.
  // By what its gradients are multiplied. Read by the threads that run backward, without the lock.
  const GradientFactors& factors() const { return factors_; }
  // One that does not average. Throws where it also goes through a forward of another weight.
  void accumulate(int task, double weight);
  void check_same(double weight) const;
  // One that averages: waits for the other ranks' weights.
  void begin(int task, double weight, int64_t step);
  // In an elastic job: whether the other ranks' weights will be known at the end of the backward only, in
  // `tell_again`: a member is lost, or the step is the first one of its view, where ranks do not know each other's
  // forwards.
  bool unknown() const { return unknown_; }
  // The backward's buckets are sent at its end, or again: the present members tell each other what they weigh.
  void tell_again(int64_t step);
  // What each rank's batch of this step weighs, by rank; empty: not known in the present view.
  std::vector<double> of_members() const { return view_ == group_.view() ? totals_ : std::vector<double>(); }
  void end();
  bool accumulated() const { return done_.total() > 0; }  // backwards that did not average have weighed something
  // A gradient that no forward has announced cannot be weighed.
  void check_announced(const std::string& parameter) const;
  // By what gradients that were left over are multiplied before they are averaged alone. All ranks call it.
  double factor_of_left_over();

 private:
  struct Share {  // of a rank, as MicroBatches has it
    double total = 0;
    double reference = 0;
    bool operator==(const Share&) const = default;
  };
  struct Exchange {
    Share own;
    at::Tensor shares;  // float64 [ranks, 2]: zeros but for this rank's, and all ranks' as soon as `work` has ended
    c10::intrusive_ptr<c10d::Work> work;
    uint64_t view = 0;  // see ReducerGroup
  };

  Share done() const { return {done_.total(), done_.reference()}; }
  Exchange begin_exchange(Share own, const std::string& note = {});
  struct Known {  // by rank
    std::vector<double> factors;
    std::vector<double> totals;
    uint64_t view = 0;  // whose ranks
  };
  // Throws on all ranks, if the weight of one of them is not valid.
  Known finish(Exchange exchange);
  void know(Known known, int64_t step);
  [[noreturn]] void throw_invalid(int rank, double weight) const;

  ReducerGroup& group_;
  const TrainableParameters& parameters_;
  const bool on_;
  double of_forward_ = 1;
  std::optional<Exchange> announced_;
  bool repeats_ = false;
  MicroBatches done_;
  double current_ = 1;  // the weight of the backward under way, or of the last one
  int task_ = -1;       // the last backward that did not average
  GradientFactors factors_;
  std::vector<double> totals_;  // of this step; empty: not known
  uint64_t view_ = 0;
  bool warned_ = false;
  bool unknown_ = false;
};

}  // namespace ringdp
