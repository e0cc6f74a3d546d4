// GradientWeights: averages gradients over samples, not over ranks, with the weight of each rank's batch (MicroBatches
// has the formula). The ranks exchange their weights in an operation of 16 bytes for each, which begins in the forward
// and is read when the backward begins. Owned by the Exchange, used under the Reducer's lock by the
// forward's thread and the threads that run backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch/reducer/forwards.h"
#include "torch/reducer/plan.h"
#include "torch/reducer/reducer_group.h"

namespace ringdp {

// Factors of gradients; 1: unchanged, 0: zeros, also for infinities and NaNs.
struct GradientFactors {
  double incoming = 1;           // of a gradient of the present backward, before it is added to .grad
  double outgoing = 1;           // of the .grad that is sent; with one rank, of .grad itself
  std::vector<double> of_ranks;  // `outgoing` of each rank; empty: all are 1
  bool when_sent = false;  // `outgoing` is 1, and a bucket is multiplied when it is sent, since it may be sent again
};

class GradientWeights {
 public:
  // Without `on` all ranks have the same weight, without an exchange.
  GradientWeights(ReducerGroup& group, const TrainableParameters& parameters, bool on)
      : group_(group), parameters_(parameters), on_(on) {}
  bool on() const { return on_; }

  // ---- Forward. The weight of this forward's backward. `sync`: that backward averages, and the exchange of weights
  // begins. A weight that is negative or not finite is an error on all ranks. `discarded`: no .grad has a part of
  // earlier backwards.
  void announce(double weight, bool sync, bool discarded, const std::string& note = {});
  // The forwards up to the end of the step are of the batch whose forward has failed: its announced weight stays.
  void repeat() {
    repeats_ = true;
    if (announced_) done_.refer_to(announced_->own.reference);
  }
  double of_forward() const { return of_forward_; }
  // On a rank that has run out of input (join).
  void shadow();

  // ---- Backward. `task`: autograd's number of it, `weight`: of the forward whose output it has reached. The factors
  // of its gradients, read by the threads that run backward, without the lock.
  const GradientFactors& factors() const { return factors_; }
  // One that does not average. Throws if it also goes through a forward of another weight.
  void accumulate(int task, double weight);
  void check_same(double weight) const;
  // One that averages: waits for the other ranks' weights.
  void begin(int task, double weight, int64_t step);
  // In an elastic job: whether the other ranks' weights come only at the end of the backward, in `exchange_again`: a
  // member is lost, or the step is the first one of its view, whose forwards the ranks have not exchanged.
  bool unknown() const { return unknown_; }
  // The backward's buckets are sent at its end, or again: exchanges weights among the present members.
  void exchange_again(int64_t step);
  // The weights of the ranks' batches in this step, by rank; empty: unknown in the present view.
  std::vector<double> of_members() const { return view_ == group_.view() ? totals_ : std::vector<double>(); }
  void end();
  bool accumulated() const { return done_.total() > 0; }  // a backward without averaging had a weight
  // Throws for a gradient without an announced weight.
  void check_announced(const std::string& parameter) const;
  // The factor of left-over gradients before they are averaged alone. All ranks call it.
  double factor_of_left_over();

 private:
  struct Share {  // of a rank, as MicroBatches has it
    double total = 0;
    double reference = 0;
    bool operator==(const Share&) const = default;
  };
  struct Exchange {
    Share own;
    at::Tensor shares;  // float64 [ranks, 2]: only this rank's row is not zero; all rows once `work` has ended
    c10::intrusive_ptr<c10d::Work> work;
    uint64_t view = 0;  // see ReducerGroup
  };

  Share done() const { return {done_.total(), done_.reference()}; }
  Exchange begin_exchange(Share own, const std::string& note = {});
  struct Known {  // by rank
    std::vector<double> factors;
    std::vector<double> totals;
    uint64_t view = 0;  // of the ranks
  };
  // Throws on all ranks if the weight of one of them is invalid.
  Known finish(Exchange exchange);
  void set_known(Known known, int64_t step);
  [[noreturn]] void throw_invalid(int rank, double weight) const;

  ReducerGroup& group_;
  const TrainableParameters& parameters_;
  const bool on_;
  double of_forward_ = 1;
  std::optional<Exchange> announced_;
  bool repeats_ = false;
  MicroBatches done_;
  double current_ = 1;  // the weight of the present or last backward
  int task_ = -1;       // the last backward that did not average
  GradientFactors factors_;
  std::vector<double> totals_;  // of this step; empty: not known
  uint64_t view_ = 0;
  bool warned_ = false;
  bool unknown_ = false;
};

}  // namespace ringdp
