// StepReport: the ranks tell each other now and then how they spent their steps, by an all-gather of about a KiB. It
// is issued when a backward begins, before its buckets, and is over before they are, so that no rank waits for it, and
// none of it is under way when a step has ended: the job may end there. What it says is interpreted in Python
// (ringdp/diagnosis). Owned by the Reducer, used under its lock, without the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/reducer_stats.h"
#include "torch/reducer/step_phases.h"

namespace ringdp {

class StepReport {
 public:
  using Clock = StepPhases::Clock;
  using Bytes = std::vector<uint8_t>;

  static constexpr std::size_t kFactsBytes = 256;    // of what Python adds
  static constexpr std::size_t kAttachedBytes = 16;  // at its end, of the guard
  // Bits of `note_forward`'s answer.
  static constexpr int kStepEnded = 1;    // since the last one
  static constexpr int kFactsWanted = 2;  // the next backward tells the others
  static constexpr int kWindowCame = 4;   // `take` has something

  // `every`: so many steps are told at once; 0: none. All ranks have the same.
  StepReport(GradientLayout& layout, const StepTimes& times, std::size_t every)
      : layout_(layout), times_(times), every_(every) {}

  const ReducerStats& stats() const { return times_.stats(); }

  int note_forward();
  void backward_began();
  void micro_batch_gradient() { phases_.gradient_arrived(Clock::now()); }
  // After `backward_began`, of a backward that averages. `joining`: some ranks may repeat the others' operations
  // (torch's Join), and do not count: such a step is not told.
  void tell_if_due(bool joining);
  // What the end of this backward waits for, beside its buckets; null: nothing.
  c10::intrusive_ptr<c10d::Work> under_way() const { return exchange_.work; }
  void drop() { exchange_ = {}; }  // its members are others now
  void computed(Clock::time_point now);
  // The backward has ended and counted.
  void finished(bool joining);

  // A bucket with this rank's gradients is about to be sent. Some bytes of each are hashed, so that the ranks hear
  // whether they all compute the same gradients.
  void add_gradients(const Bucket& bucket);

  // What Python adds to what is told next; at most kFactsBytes. The C++ side puts two uint64 before its last
  // kAttachedBytes: a hash of the gradients of the steps that are told, and of how many steps; steps whose gradients
  // were zeros are left out.
  void set_facts(const Bytes& facts);
  // By rank, what all ranks told last; once. Begins with five int64: the number of rows, the step, and of the rank's
  // all-gather before the times when it was issued and over, in ns of the steady clock (0: there was none), and the
  // time of the last bucket's launch; then `every` rows, the oldest first, and the facts.
  std::optional<std::vector<Bytes>> take();
  const StepRow& last_row() const { return last_; }

 private:
  struct Exchange {
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> received;
    int64_t issued_ns = 0;
    std::shared_ptr<std::atomic<int64_t>> ended_ns;  // shared with the work's callback
  };

  bool told() const;
  bool due(std::size_t steps) const;
  void hear();
  void follow_members();  // of another group nothing is known yet
  void forget_gradients() { gradients_ = {}; }
  Bytes packed(int64_t step) const;

  GradientLayout& layout_;
  const StepTimes& times_;
  const std::size_t every_;
  StepPhases phases_;
  StepRow last_{};
  std::vector<StepRow> rows_;
  Bytes facts_;
  std::weak_ptr<void> members_;  // of the group, when `steps_` was 0: a group that gets others begins again
  std::size_t steps_ = 0;        // with these members, but for those under Join
  bool step_ended_ = false;
  bool due_ = false;  // the next backward tells
  struct Gradients {
    uint64_t hash = 0;
    uint64_t steps = 0;
  };
  Gradients gradients_;         // of the steps since the ranks told each other
  uint64_t step_hash_ = 0;      // of the buckets that were sent in this backward
  bool some_gradient_ = false;  // that is not zero
  Exchange exchange_;
  int64_t issued_before_ns_ = 0, ended_before_ns_ = 0;
  std::optional<std::vector<Bytes>> window_;
};

}  // namespace ringdp
