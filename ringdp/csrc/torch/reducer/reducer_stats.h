// StepTimes: the times and bytes of a step, by the host's clock, without waiting for devices. BucketRow: the same for
// one bucket. Owned by the Reducer, used under its lock.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/gradient_layout.h"

namespace ringdp {

// Timings of the last synchronised backward, and running totals.
struct ReducerStats {
  int64_t steps = 0;
  int64_t buckets = 0;
  int64_t bytes = 0;          // gradients of one step
  double backward_s = 0;      // from the first output or gradient to the last gradient
  double exposed_wait_s = 0;  // the end of backward waited for communication
  double total_backward_s = 0;
  double total_exposed_wait_s = 0;
  // When that backward began, launched its first bucket, had its last gradient, and ended: ns of the steady clock.
  int64_t began_ns = 0;
  int64_t launched_ns = 0;
  int64_t computed_ns = 0;
  int64_t finished_ns = 0;
  int64_t unused_bytes = 0;  // of parameters without gradient on this rank
};

class StepTimes {
 public:
  using Clock = std::chrono::steady_clock;

  void begin();
  void note_first_launch();
  // The gradients were complete at `gradients_done`, and now the backward ends.
  void end(Clock::time_point gradients_done, int64_t unused_bytes, bool local);

  // A step sends the plan's kept buckets, and then single late ones.
  void count_kept(const BucketPlan& plan);
  void count_bucket(const BucketPlan& plan, std::size_t bucket);
  const ReducerStats& stats() const { return stats_; }

 private:
  ReducerStats stats_;
  Clock::time_point began_;
};

// The largest number of steps of a reducer of this process, alive or destroyed. Any thread.
int64_t most_steps();

// The cost of one bucket in its last sending.
struct BucketRow {
  std::size_t index = 0;
  std::string name;
  int reduction = -1;                   // -1: exact
  bool free = false;                    // `choose` may give it another
  std::vector<std::size_t> parameters;  // of the module, in the order of the buffer
  std::size_t numel = 0;                // gradients
  std::size_t bytes_before = 0;         // of the gradients in the bucket's dtype
  // of the codes of one rank's gradients; for hook reductions equal to bytes_before
  std::size_t bytes_after = 0;
  double launched_s = 0;  // when it was launched, from the first bucket of that backward on
  double coding_s = 0;    // spent on encoding and decoding in the core
  double seconds = 0;     // from launch to the end of its reduction
  double exposed_s = 0;   // the end of backward waited for it
};

std::vector<BucketRow> bucket_rows(const GradientLayout& layout, const ReducerStats& stats);

}  // namespace ringdp
