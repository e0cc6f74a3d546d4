// Forwards: counts the forwards that train and synchronise since the last averaging backward, and those without a
// backward. Ranks that differ there average gradients of different steps. No torch. Owned by the Exchange, used
// under the Reducer's lock.
//
// Demand: whether the next backward synchronises. No torch. Owned by the Reducer, used under its lock. `task`:
// autograd's number of the backward that runs in this thread.
//
// MicroBatches: the weights of the backwards whose gradients a rank adds up before it averages them with the other
// ranks'. The mean over all samples is sum(w * g) / sum(w), over the micro-batches of all ranks; g is the gradient of
// a micro-batch's mean loss, w the number of its samples (or tokens). .grad adds up (w / reference) * g, so that it
// keeps the size of a gradient; what is sent is .grad times `factor`. Owned by GradientWeights, used under
// the Reducer's lock.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>

namespace ringdp {

// One forward. Owned by its graph.
struct Forward {
  bool sync = true;
  double weight = 1;
  bool training = true;  // its module was in training mode
  // Values of Forwards; -1: it is not counted, or has no backward yet.
  int64_t period = -1;
  int64_t followed = -1;
};

class Forwards {
 public:
  // `in_graph`: a backward through its outputs is noticed. Otherwise the next backward through no known output counts
  // as that of one such forward.
  void count(Forward& forward, bool in_graph);
  // A backward goes through its outputs. True: a backward of an earlier step did so before.
  bool follow(Forward& forward);
  // An averaging backward begins, `again` through a forward of an earlier step.
  void begin(bool again) {
    again_ = again;
    if (evaluating_) ++evaluations_;
  }
  // Whether all ranks in it run the same forwards.
  void set_comparable(bool comparable) { comparable_ = comparable; }
  // An exception has ended the backward before anything was sent: its forwards count as without a backward.
  void abandon();
  // Resets the counts: the backward has ended, or its batch is repeated.
  void settle();

  // The optimizer begins to evaluate a closure, maybe several times, each with a backward; or has ended its step.
  void begin_closure() { evaluating_ = true, evaluations_ = 0; }
  void end_closure() { evaluating_ = false, evaluations_ = 0; }

  // The suffix of the name of the backward's first operation, so that ranks that differ get a MismatchError; empty in
  // nearly all steps.
  std::string note() const;
  // The same for an operation in a forward, before it counts.
  std::string note_of(bool training) const;
  // The explanation for ranks whose notes differ; empty if `text` has no note.
  static std::string explain(const std::string& text);

 private:
  struct Counts {
    int64_t open = 0;      // in a graph, without a backward
    int64_t followed = 0;  // in a graph, with a backward
    int64_t unseen = 0;    // without a known graph
  };
  Counts& counts(bool training) { return counts_[training ? 1 : 0]; }

  Counts counts_[2];      // of evaluation and training mode: a single rank may evaluate with gradients
  int64_t period_ = 0;    // incremented by each reset
  int64_t attempt_ = 0;   // also incremented by each abandoned backward
  bool training_ = true;  // of the forward of the present backward, or of the last forward
  bool seen_ = false;     // that backward went through known outputs
  bool again_ = false;
  bool comparable_ = false;
  bool evaluating_ = false;
  int64_t evaluations_ = 0;
};

class Demand {
 public:
  // A synchronising forward has run; its graph owns `due`.
  void arm(const std::shared_ptr<void>& due) {
    armed_ = true;
    due_ = due;
  }
  // The next backward synchronises, even after a forward without sync.
  void demand() { armed_ = demanded_ = true; }
  bool demanded() const { return demanded_; }
  // Whether the graph of a synchronising forward exists, and no backward has gone through it.
  bool due() const { return armed_ && (demanded_ || !due_.expired()); }
  // This backward does not synchronise.
  void stay_quiet(int task) { quiet_task_ = task; }
  bool quiet(int task) const { return task == quiet_task_; }
  // Whether the next gradient begins a step.
  bool synchronises(int task) const { return armed_ && task != quiet_task_; }
  // A step begins, or is given up.
  void settle() { armed_ = demanded_ = false; }

 private:
  bool armed_ = false;
  std::weak_ptr<void> due_;
  bool demanded_ = false;
  int quiet_task_ = -1;
};

class MicroBatches {
 public:
  static bool valid(double weight) { return std::isfinite(weight) && weight >= 0; }

  // A backward of this weight begins. Returns the factor of its gradients: 1 for the first one and for equal weights,
  // 0 for weight 0.
  double add(double weight) {
    if (reference_ == 0) reference_ = weight;
    total_ += weight;
    return reference_ == 0 ? 0.0 : weight / reference_;
  }
  // Sets the reference weight, unless a backward has set it.
  void refer_to(double weight) {
    if (reference_ == 0) reference_ = weight;
  }
  double total() const { return total_; }
  double reference() const { return reference_; }
  void clear() { total_ = reference_ = 0; }

  // The factor of a rank's accumulated gradient such that the sum over the ranks divided by `divisor` is the mean.
  // `reference`: that rank's, `sum`: of the totals of all ranks. Exactly 1 if all ranks have the same total and the
  // weights are equal; 0 if all weights are 0.
  static double factor(double reference, double sum, double divisor) {
    if (sum == 0 || reference == 0) return 0.0;
    const double factor = divisor * reference / sum;
    // The sum of equal numbers that are not integers may be rounded.
    const double rounding = 2 * (divisor + 1) * std::numeric_limits<double>::epsilon();
    return std::abs(factor - 1) <= rounding ? 1.0 : factor;
  }

 private:
  double total_ = 0;
  double reference_ = 0;  // the first weight above zero
};

}  // namespace ringdp
