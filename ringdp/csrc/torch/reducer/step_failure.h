// StepFailure: the first failure after which the ranks no longer agree. After it no step begins. Owned by the Reducer.
// Called by the threads that run backward, with or without the reducer's lock, because waits for buckets run without
// it; it takes that lock itself to keep a failure.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "engine/elastic_group.h"
#include "torch/reducer/backward_state.h"
#include "torch/reducer/reducer_group.h"

namespace ringdp {

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
