// StepPhases: the time of a rank's steps by phase, by the host's clock: between steps, in forward, in backward, after
// backward (the optimizer), waiting in other operations, and waiting at the end of backward. A step's time runs from
// the end of one backward that averages gradients to the end of the next; micro-batches belong to the step that
// averages them. Owned by the StepReport, used under the Reducer's lock. `waited_ns` is everywhere
// RingWork::waited_ns().
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "base/core_probe.h"
#include "base/run_delay.h"

namespace ringdp {

// The measurements of each step, in seconds.
enum StepField : std::size_t {
  kBetween,    // after the optimizer, before the forward: data loading, evaluation, logging
  kForward,    // and the loss
  kBackward,   // until the last gradient
  kAfter,      // from the end of the last backward to the end of the optimizer
  kOtherWait,  // blocked in other operations of ring, in any phase; excluded from the four above
  kExposed,    // the end of backward waited for the buckets
  kCoding,     // encoding and decoding, also part of the above
  kOnItsWay,   // from the first bucket's launch to the end
  kOffCore,    // of the first four: runnable, but without a core
  kProbe,      // mean time of CoreProbe's loop at the beginnings of forward, backward and the wait for the buckets
  kStepFields
};
using StepRow = std::array<float, kStepFields>;

class StepPhases {
 public:
  using Clock = std::chrono::steady_clock;

  void forward_began(Clock::time_point now, int64_t waited_ns);
  void backward_began(Clock::time_point now, int64_t waited_ns);
  void gradient_arrived(Clock::time_point now) { last_gradient_ = now; }    // of a micro-batch that is not averaged
  void computed(Clock::time_point now, int64_t waited_ns, RunDelay delay);  // the last gradient of the step
  StepRow finished(Clock::time_point now, int64_t waited_ns, RunDelay delay);

  // An optimizer of this process has ended its step. Any thread.
  static void note_optimizer();

 private:
  void enter(StepField next, Clock::time_point now, int64_t waited_ns);

  StepRow row_{};
  StepField phase_ = kAfter;
  bool began_ = false;  // the first step has no time before its forward
  Clock::time_point since_;
  Clock::time_point last_gradient_;
  int64_t waited_ns_ = 0;
  CoreProbe probe_;
  RunDelay delay_;  // at the end of the step before
};

}  // namespace ringdp
