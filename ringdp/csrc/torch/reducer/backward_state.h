// BackwardState: whether the next backward synchronises, whether a synchronising one is in progress, and how it ended.
// No torch. Owned by the Reducer, used under its lock. `task`: autograd's number of the backward that runs in this
// thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "torch/reducer/forwards.h"

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

}  // namespace ringdp
