// Forwards: the forwards that train and synchronise since the last backward that averaged, and how many of them no
// backward has gone through. Ranks that differ there average gradients of different steps. No torch. Part of the
// BackwardState, used under the Reducer's lock.
#pragma once

#include <cstdint>
#include <string>

namespace ringdp {

// One forward. Its graph keeps it.
struct Forward {
  bool sync = true;
  double weight = 1;
  bool training = true;  // its module was in training mode
  // Of Forwards; -1: it is not counted, or no backward has gone through it.
  int64_t period = -1;
  int64_t followed = -1;
};

class Forwards {
 public:
  // `in_graph`: a backward can be seen to go through its outputs. Otherwise the next backward that goes through no
  // output at all is taken as that of one such forward.
  void count(Forward& forward, bool in_graph);
  // A backward goes through its outputs. True: one of an earlier step had done so.
  bool follow(Forward& forward);
  // A backward that averages begins, `again` through a forward of an earlier step.
  void begin(bool again) {
    again_ = again;
    if (evaluating_) ++evaluations_;
  }
  // Whether all ranks that take part in it run the same forwards.
  void set_comparable(bool comparable) { comparable_ = comparable; }
  // An exception has ended the backward before anything was sent: no backward has gone through its forwards.
  void abandon();
  // What was counted so far is over: the backward has ended, or its batch is repeated.
  void settle();

  // The optimizer evaluates a closure from now on, maybe several times, each with a backward; or has ended its step.
  void begin_closure() { evaluating_ = true, evaluations_ = 0; }
  void end_closure() { evaluating_ = false, evaluations_ = 0; }

  // What the name of the first operation of the backward that has begun ends in, so that ranks that differ get a
  // MismatchError; empty in nearly all steps.
  std::string note() const;
  // The same of an operation in a forward, before it counts.
  std::string note_of(bool training) const;
  // What ranks that differ in a note are told: empty where `text` has none.
  static std::string explain(const std::string& text);

 private:
  struct Counts {
    int64_t open = 0;      // in a graph, and not followed
    int64_t followed = 0;  // the others
    int64_t unseen = 0;    // not in a graph that is known
  };
  Counts& counts(bool training) { return counts_[training ? 1 : 0]; }

  Counts counts_[2];      // in evaluation mode, in training mode: one rank alone may evaluate with gradients
  int64_t period_ = 0;    // grows where all of before is settled
  int64_t attempt_ = 0;   // and also where a backward is abandoned
  bool training_ = true;  // of the forward whose backward is under way, or of the last one
  bool seen_ = false;     // that backward went through outputs
  bool again_ = false;
  bool comparable_ = false;
  bool evaluating_ = false;
  int64_t evaluations_ = 0;
};

}  // namespace ringdp
