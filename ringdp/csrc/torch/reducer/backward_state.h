// BackwardState: whether the next backward synchronises, whether a synchronising one is in progress, and how it ended.
// No torch. Owned by the Reducer, used under its lock. `task`: autograd's number of the backward that runs in this
// thread.
//
// StepFailure: the first failure after which the ranks no longer agree. After it no step begins. Owned by the Reducer.
// Called by the threads that run backward, with or without the reducer's lock, because waits for buckets run without
// it; it takes that lock itself to keep a failure.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "engine/elastic_group.h"
#include "torch/reducer/forwards.h"
#include "torch/reducer/reducer_group.h"

namespace ringdp {

class BackwardState {
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

  // `again`: see Forwards.
  void begin(bool again) {
    active_ = true;
    ended_short_ = armed_ = demanded_ = false;
    ++step_;
    forwards_.begin(again);
  }
  void end() { active_ = false; }
  // Resets to the state before the backward.
  void abandon() {
    active_ = false;
    forwards_.abandon();
  }
  // It ran to its end while gradients were missing, and stays active: the next forward raises an error.
  void end_short() { ended_short_ = true; }
  void reset() {
    active_ = armed_ = demanded_ = false;
    peer_report_.clear();
    forwards_.settle();
  }
  // The result of notifying the other ranks that it did not end.
  void set_peer_report(std::string report) { peer_report_ = std::move(report); }
  const std::string& peer_report() const { return peer_report_; }

  bool active() const { return active_; }
  bool ended_short() const { return ended_short_; }
  int64_t step() const { return step_; }  // counts the backwards that synchronise
  Forwards& forwards() { return forwards_; }
  const Forwards& forwards() const { return forwards_; }

 private:
  bool armed_ = false;
  std::weak_ptr<void> due_;
  bool demanded_ = false;
  bool active_ = false;
  bool ended_short_ = false;
  int quiet_task_ = -1;
  int64_t step_ = 0;
  std::string peer_report_;
  Forwards forwards_;
};

class StepFailure {
 public:
  StepFailure(std::recursive_mutex& mutex, const BackwardState& backward) : mutex_(mutex), backward_(backward) {}

  // Runs `action`, and keeps the text of its exception. After Error(kMembership) the program may continue.
  template <class Action>
  auto keeping(Action&& action) {
    try {
      return std::forward<Action>(action)();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kMembership) keep(current_error_text());
      throw;
    } catch (...) {
      keep(current_error_text());
      throw;
    }
  }
  // The same for an operation of this step; its exception gets the operation's name. `bucket` is -1 if it is not a
  // bucket's.
  template <class Action>
  void keeping_in(int64_t bucket, const std::string& name, Action&& action) {
    std::exception_ptr loss;
    keeping([&] {
      in_bucket(bucket, name, backward_.step(), [&] {
        try {
          std::forward<Action>(action)();
        } catch (const Error& error) {
          if (!lost_ || !is_loss(error)) throw;
          loss = std::current_exception();
        } catch (...) {  // a hook's version of the same failure
          if (!lost_ || !lost_()) throw;
          loss = std::make_exception_ptr(Error(ErrorKind::kPeerLost, current_error_text()));
        }
      });
    });
    if (loss) std::rethrow_exception(loss);
  }
  // The loss of a member is not a failure: the step is repeated (StepRepair). `lost`: whether the present members have
  // lost one.
  void let_losses_pass(std::function<bool()> lost) { lost_ = std::move(lost); }

  // The text of that exception; empty: there was none. Under the lock.
  const std::string& text() const { return text_; }
  void forget() { text_.clear(); }

 private:
  void keep(std::string text) {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = std::move(text);
  }

  std::recursive_mutex& mutex_;
  const BackwardState& backward_;
  std::string text_;
  std::function<bool()> lost_;  // empty: each loss is a failure
};

}  // namespace ringdp
