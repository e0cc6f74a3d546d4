// Step: one backward that averages gradients, from its first gradient to the means. Made when that backward begins and
// dropped at its end, so that nothing of one step is seen by the next. Invariant: a bucket is launched when all its
// gradients have arrived and all buckets before it have been launched. Owned by the Reducer and by the thread that ends
// the backward; its methods are called under the Reducer's lock, by the threads that run backward, without the GIL.
// Those that take the lock let it go while they wait for operations or run Python code, which may call the reducer.
//
// JoinShadow: torch's Join, for ranks that run out of input before others. Before each backward the ranks with input
// count themselves, and divide by that number; a rank without input repeats ("shadows") their operations with zeros.
// Owned by the Reducer, used under its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/buckets.h"
#include "torch/reducer/exchange.h"
#include "torch/reducer/plan.h"
#include "torch/reducer/step_report.h"
#include "torch/reducer/step_results.h"

namespace ringdp {

class JoinShadow {
 public:
  JoinShadow(const Plan& plan, Exchange& exchange, Buckets& buckets)
      : plan_(plan), exchange_(exchange), buckets_(buckets) {}

  // ---- On a rank with input. `work`: their number, before a forward.
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks);
  void forget_forward_work() { forward_work_ = nullptr; }
  bool counts() const { return forward_work_ != nullptr; }  // the ranks with input, for the next backward
  void divide();                                            // divides the sums of this backward by their number
  void divide_by(int64_t ranks_with_input);                 // 0: all ranks

  // ---- On a rank without input. During a forward of the others:
  void shadow_weight() { exchange_.weights.shadow(); }
  std::vector<c10d::GradBucket> zero_buckets();
  FuturePointer shadow(c10d::GradBucket& zeros);
  void shadow_used_map();  // if it is an operation of its own

 private:
  const Plan& plan_;
  Exchange& exchange_;
  Buckets& buckets_;
  c10::intrusive_ptr<c10d::Work> forward_work_;
  bool divide_by_all_ranks_ = true;
};

using ReducerLock = std::unique_lock<std::recursive_mutex>;

class Step {
 public:
  // `joining`: some ranks may have run out of input, and repeat all buckets (JoinShadow).
  Step(Plan& plan, Exchange& exchange, Buckets& buckets, StepReport& report, bool joining);
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // ---- Gradients. Parameters that will not have one are ready at once.
  void begin();
  // Throws if the parameter's gradient has arrived before, or is not in the static graph.
  void arrived(std::size_t parameter);

  // ---- The backward has run to its end. False: gradients are missing; the next forward raises an error.
  bool complete();
  // Launches the rest of the buckets, with zeros for missing gradients.
  void finish();
  // Waits for the buckets, reads which parameters some rank has used, and sends the late buckets that follow from this.
  void wait_for_means(ReducerLock& lock);
  // Commits residuals, hands out the means, and waits for `futures`. `hooks` is destroyed without the lock, since it
  // calls Python. `keep_none`: a .grad that the program has set to None stays None.
  void hand_out(ReducerLock& lock, HookVerdicts& hooks, bool keep_none);
  void wait_for_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures);
  // The step counts: all ranks learn the order of the gradients, and the states of hook reductions count if all
  // results were finite.
  void learn_order() { learn(ask_for_order()); }
  void note_unused(HookVerdicts& hooks) const { hooks.note_unused(plan_.reductions, plan_.parameters, used_); }

  // ---- In an elastic job, in the place of wait_for_means (BackwardUnit).
  void send_again();  // all launched buckets, with the same gradients, to the present members
  void wait_for_members(ReducerLock& lock);
  void accept();  // all members have the means

  // ---- Of a backward that has not ended.
  std::size_t sent() const { return arrivals_.sent(); }
  // Throws DDP's error. `notify`: fails the other ranks' wait.
  [[noreturn]] void throw_unfinished(bool notify);

  const std::vector<std::size_t>& order() const { return arrivals_.order(); }  // of arrival

 private:
  std::vector<std::size_t> never_to_come() const;
  void write(std::size_t parameter, bool late = false);
  void mark_ready(std::size_t parameter);
  void launch(Bucket& bucket);
  void send(Bucket& bucket, const std::string& note = {});
  void wait_for(std::size_t first, std::size_t end);
  void wait_for_sent(ReducerLock& lock);
  void wait_for_late(ReducerLock& lock);
  at::Tensor reduced_marks() const;
  void read_used_map();
  void send_late();
  void learn(const std::vector<int32_t>& order);
  std::vector<int32_t> ask_for_order() { return exchange_.ask_for_order(arrivals_.order(), used_.somewhere()); }

  Plan& plan_;
  Exchange& exchange_;
  Buckets& buckets_;
  StepReport& report_;
  const bool joining_;
  Arrivals arrivals_;
  UsedMap used_;
  std::vector<std::size_t> missing_;  // this rank's parameters without gradient
  StepTimes::Clock::time_point gradients_done_;
  std::vector<int32_t> learned_order_;  // in an elastic job, before the step counts
  bool ended_short_ = false;            // it has run to its end, while gradients were missing
  std::string peer_report_;             // the result of notifying the other ranks that it did not end
};

}  // namespace ringdp
