// Forwards: counts the forwards that train and synchronise since the last averaging backward, and those without a
// backward. Ranks that differ there average gradients of different steps. No torch. Part of the BackwardState, used
// under the Reducer's lock.
#pragma once

#include <cstdint>
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

}  // namespace ringdp
