// StepReport: an all-gather of about a KiB, at intervals, of the times of the ranks' steps. It is issued when a
// backward begins, before its buckets. It finishes before the buckets do. So it never delays a step, and none is
// pending when the job ends after a step. Python interprets it (ringdp/diagnosis). Owned by the Reducer, used under
// its lock, without the GIL.
//
// StepPhases: the time of a rank's steps by phase, by the host's clock: between steps, in forward, in backward, after
// backward (the optimizer), waiting in other operations, and waiting at the end of backward. A step's time runs from
// the end of one backward that averages gradients to the end of the next; micro-batches belong to the step that
// averages them. Owned by the StepReport, used under the Reducer's lock. `waited_ns` is everywhere
// RingWork::waited_ns().
//
// StepTimes: the times and bytes of a step, by the host's clock, without waiting for devices. BucketRow: the same for
// one bucket. Both are parts of the StepReport.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/core_probe.h"
#include "torch/reducer/bucket_store.h"
#include "torch/reducer/exchange.h"
#include "torch/reducer/plan.h"

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
  // So many steps are behind this one, some by other ranks maybe.
  void go_on_from(int64_t step) { stats_.steps = step; }
  const ReducerStats& stats() const { return stats_; }

 private:
  ReducerStats stats_;
  Clock::time_point began_;
};

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

class StepReport {
 public:
  using Clock = StepPhases::Clock;
  using Bytes = std::vector<uint8_t>;

  static constexpr std::size_t kFactsBytes = 256;    // of Python's part
  static constexpr std::size_t kAttachedBytes = 16;  // of the guard, at its end
  // Bits of `note_forward`'s result.
  static constexpr int kStepEnded = 1;    // since the last one
  static constexpr int kFactsWanted = 2;  // the next backward sends them
  static constexpr int kWindowCame = 4;   // `take` has a new window

  // `every`: the steps of one exchange; 0: no exchange. The same on all ranks.
  StepReport(const Plan& plan, const Exchange& exchange, const BucketStore& store)
      : plan_(plan), exchange_(exchange), store_(store), every_(plan.options.report_every) {}

  const ReducerStats& stats() const { return times_.stats(); }
  std::vector<BucketRow> bucket_rows() const;
  // A step sends the plan's kept buckets, and then single late ones.
  void count_kept() { times_.count_kept(plan_.buckets); }
  void go_on_from(int64_t step) { times_.go_on_from(step); }
  void count_bucket(std::size_t bucket) { times_.count_bucket(plan_.buckets, bucket); }

  int note_forward();
  void step_began() { times_.begin(), backward_began(); }
  void backward_began();  // or a micro-batch's
  void micro_batch_gradient() { phases_.gradient_arrived(Clock::now()); }
  // After `backward_began`, of a backward that averages. `joining`: some ranks may repeat the others' operations
  // (torch's Join), and do not count: then no exchange.
  void exchange_if_due(bool joining);
  // The exchange for which the end of this backward waits, besides its buckets; null: none.
  c10::intrusive_ptr<c10d::Work> under_way() const { return sent_.work; }
  void drop() { sent_ = {}; }  // its members have changed
  void note_first_launch() { times_.note_first_launch(); }
  void computed(Clock::time_point now);
  // The backward has ended and counted. Its gradients were complete at `gradients_done`.
  void finished(Clock::time_point gradients_done, int64_t unused_bytes, bool joining);

  // Called before a bucket with this rank's gradients is sent. Hashes some of its bytes, so that the ranks find out
  // whether they all compute the same gradients.
  void add_gradients(const Bucket& bucket);

  // Python's part of the next exchange; at most kFactsBytes. The C++ side puts two uint64 before its last
  // kAttachedBytes: a hash of the gradients of the reported steps, and the number of these; steps whose gradients were
  // zeros are left out.
  void set_facts(const Bytes& facts);
  // All ranks' reports of the last exchange, by rank; once. Each begins with five int64: the number of rows, the step,
  // the times when the rank's all-gather before was issued and ended, in ns of the steady clock (0: there was none),
  // and the time of the last bucket's launch; then `every` rows, the oldest first, and the facts.
  std::optional<std::vector<Bytes>> take();
  const StepRow& last_row() const { return last_; }

 private:
  struct Sent {
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> received;
    int64_t issued_ns = 0;
    std::shared_ptr<std::atomic<int64_t>> ended_ns;  // shared with the work's callback
  };

  bool exchanges() const;
  bool due(std::size_t steps) const;
  void take_answers();
  void follow_members();  // drops the state of other members
  void forget_gradients() { gradients_ = {}; }
  Bytes packed(int64_t step) const;

  const Plan& plan_;
  const Exchange& exchange_;
  const BucketStore& store_;
  const std::size_t every_;
  StepTimes times_;
  StepPhases phases_;
  StepRow last_{};
  std::vector<StepRow> rows_;
  Bytes facts_;
  std::weak_ptr<void> members_;  // of the group, when `steps_` was 0: new members restart the count
  std::size_t steps_ = 0;        // with these members, without those under Join
  bool step_ended_ = false;
  bool due_ = false;  // the next backward issues an exchange
  struct Gradients {
    uint64_t hash = 0;
    uint64_t steps = 0;
  };
  Gradients gradients_;         // of the steps since the last exchange
  uint64_t step_hash_ = 0;      // of the buckets that were sent in this backward
  bool some_gradient_ = false;  // a gradient was not zero
  Sent sent_;
  int64_t issued_before_ns_ = 0, ended_before_ns_ = 0;
  std::optional<std::vector<Bytes>> window_;
};

}  // namespace ringdp
