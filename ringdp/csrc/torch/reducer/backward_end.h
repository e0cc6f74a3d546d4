// BackwardEnd: the end of a backward, from its last gradient to the means: it waits for the buckets, reads which
// parameters some rank has used, sends the late buckets that follow from this, commits residuals, and hands out the
// means. Owned by the Reducer. Its methods run one after the other in Reducer::end_backward, under the reducer's lock;
// those marked "without the lock" wait for operations or run Python code, which may call the reducer. None holds the
// GIL.
//
// JoinShadow: torch's Join, for ranks that run out of input before others. Before each backward the ranks with input
// count themselves, and divide by that number; a rank without input repeats ("shadows") their operations with zeros.
// Owned by the Reducer, used under its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "torch/reducer/backward_state.h"
#include "torch/reducer/bucket_filler.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/overflow_report.h"
#include "torch/reducer/reducer_stats.h"
#include "torch/reducer/step_failure.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

class JoinShadow {
 public:
  JoinShadow(GradientLayout& layout, UsedMap& used) : layout_(layout), used_(used) {}

  // ---- On a rank with input. `work`: their number, before a forward.
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks);
  void forget_forward_work() { forward_work_ = nullptr; }
  void begin_backward() { joining_ = forward_work_ != nullptr; }
  bool joining() const { return joining_; }  // some ranks may have run out of input, and repeat all buckets
  void divide();                             // divides the sums of this backward by the counted number
  void divide_by(int64_t ranks_with_input);  // 0: all ranks

  // ---- On a rank without input. During a forward of the others:
  void shadow_weight() { layout_.weights.shadow(); }
  std::vector<c10d::GradBucket> zero_buckets();
  FuturePointer shadow(c10d::GradBucket& zeros, int64_t step);
  void shadow_used_map();  // if it is an operation of its own

 private:
  GradientLayout& layout_;
  UsedMap& used_;
  c10::intrusive_ptr<c10d::Work> forward_work_;
  bool divide_by_all_ranks_ = true;
  bool joining_ = false;
};

class BackwardEnd {
 public:
  using Missing = std::vector<std::size_t>;  // this rank's parameters without gradient

  BackwardEnd(GradientLayout& layout, ArrivalTracker& arrivals, BackwardState& backward, UsedMap& used,
              const JoinShadow& join, StepFailure& failure, StepTimes& times, BucketFiller& filler)
      : layout_(layout),
        arrivals_(arrivals),
        backward_(backward),
        used_(used),
        join_(join),
        failure_(failure),
        times_(times),
        filler_(filler) {}

  // The program's optimizer runs within backward: a .grad that it has set to None stays None.
  void set_optimizer_in_backward() { optimizer_in_backward_ = true; }
  // The next end also waits for these.
  void install_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures);
  void forget_futures() { futures_.clear(); }

  // ---- The steps of an end, in their order.
  void wait_for_sent();      // the buckets launched during backward; without the lock
  void wait_for_used_map();  // in an elastic job, if it is an operation of its own; without the lock
  void learn_used(const Missing& missing);
  bool may_send_late() const;  // some buckets were not sent
  void send_late();            // sends those for which some rank has a gradient
  void wait_for_late();        // without the lock
  HookVerdicts used_hooks() const;
  void ask_hooks(HookVerdicts& hooks);  // without the lock; first waits for announcements to the ring
  void hand_out(const Missing& missing, const HookVerdicts& hooks);
  void wait_for_futures();
  void count(StepTimes::Clock::time_point gradients_done, const Missing& missing);
  // On a rank that has run out of input (join), in hand_out's place.
  void shadow(const HookVerdicts& hooks);
  // Asks rank 0 for the order of the gradients, if the plan has not learned it yet.
  std::optional<std::vector<int32_t>> ask_for_order();
  void learn_order(const std::optional<std::vector<int32_t>>& order);

 private:
  void wait_for(std::size_t first, std::size_t end);

  GradientLayout& layout_;
  ArrivalTracker& arrivals_;
  BackwardState& backward_;
  UsedMap& used_;
  const JoinShadow& join_;
  StepFailure& failure_;
  StepTimes& times_;
  BucketFiller& filler_;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures_;
  bool optimizer_in_backward_ = false;
};

}  // namespace ringdp
