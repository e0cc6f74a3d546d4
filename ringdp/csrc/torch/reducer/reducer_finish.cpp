// The end of backward: it completes the missing gradients, waits for the buckets, hands the results out, and learns the order
// for the next layout.

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/backend/future_wait.h"
#include "torch/reducer/reducer.h"
#include "torch/reducer/reducer_errors.h"

namespace ringdp {
void Reducer::end_backward() {
  Lock lock(mutex_);
  if (!backward_.active()) return;
  const auto gradients_done = Clock::now();
  std::vector<std::size_t> missing;
  if (!arrivals_.complete(options_.unused == UnusedParameters::kForbidden)) return backward_.end_short();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!arrivals_.ready(i)) write_to_bucket(i);
    if (!arrivals_.used(i)) missing.push_back(i);
  }
  arrivals_.graph_learned();
  HookReductions hook_reductions;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!arrivals_.ready(i)) mark_ready(i);
  }
  if (!local()) {
    lock.unlock();  // callbacks of hooks may ask this reducer something
    wait_for_buckets(0, arrivals_.sending());
    lock.lock();
    noting_failure(-1, "which parameters were used", [&] {
      if (calls_back() && sends_used_map()) used_.launch(/*with_input=*/true);
      const bool idle = options_.skip_unused && (plan_.kept() < store_.size() || !plan_.order_known());
      used_.end_backward(store_[plan_.kept() - 1].marks, !missing.empty() || idle, backward_.step(), joining_);
    });
    if (plan_.kept() < store_.size()) {
      count_traffic();
      send_late_buckets();
      lock.unlock();
      wait_for_buckets(arrivals_.sending(), store_.size());
      lock.lock();
    }
    lock.unlock();
    follow_announcements();
    hook_reductions = ask_hook_reductions();
    lock.lock();
    look_at_reports(hook_reductions);
    commit_residuals();
    hand_out();
    noting_failure(-1, "which ranks lack gradients", [&] { used_.warn(missing, backward_.step(), joining_); });
  }
  for (auto& future : std::exchange(futures_, {})) {
    wait_until_complete(*future, std::chrono::milliseconds(0));
    future->wait();
  }
  ++stats_.steps;
  note_times(gradients_done, missing);
  stats_.backward_s = seconds(gradients_done - began_);
  stats_.exposed_wait_s = local() ? 0 : seconds(Clock::now() - gradients_done);
  stats_.total_backward_s += stats_.backward_s;
  stats_.total_exposed_wait_s += stats_.exposed_wait_s;
  backward_.end();
  if (!plan_.order_known() && !local()) exchange_order();
  lock.unlock();
  finish_hook_reductions(hook_reductions);
}

void Reducer::note_times(Clock::time_point gradients_done, const std::vector<std::size_t>& missing) {
  stats_.computed_ns = nanoseconds(gradients_done);
  stats_.finished_ns = nanoseconds(Clock::now());
  stats_.unused_bytes = 0;
  for (std::size_t i : missing) stats_.unused_bytes += static_cast<int64_t>(plan_.gradients()[i].bytes());
}

void Reducer::wait_for_buckets(std::size_t first, std::size_t end) {
  for (std::size_t index = first; index < end; ++index) {
    Bucket& bucket = store_[index];
    noting_failure(static_cast<int64_t>(bucket.index), bucket.name, [&] { bucket_reducer_.wait(bucket); });
  }
}

void Reducer::follow_announcements() {
  noting_failure(-1, "announced before", [&] { bucket_reducer_.follow_announcements(backward_.step()); });
}

// Sends the skipped buckets for which some rank has a gradient after all. All ranks have read the same map.
void Reducer::send_late_buckets() {
  for (std::size_t index = plan_.kept(); index < store_.size(); ++index) {
    Bucket& bucket = store_[index];
    const auto used = [&](std::size_t member) { return used_.somewhere().empty() || used_.somewhere()[member]; };
    const bool sent = index < arrivals_.sending();
    if (!sent && std::none_of(bucket.members.begin(), bucket.members.end(), used)) continue;
    count_bucket(index);
    if (sent) continue;
    for (std::size_t member : bucket.members) {
      if (!arrivals_.used(member)) write_to_bucket(member, /*late=*/true);
    }
    launch(bucket);
  }
}

void Reducer::hand_out() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (used_.used_somewhere(i)) store_.hand_out(i, arrivals_.used(i) || optimizer_in_backward_);
  }
  store_.end_backward();
}

bool Reducer::sends_used_map() const {
  return used_.needed() && !local() && !store_.empty() && !store_[plan_.kept() - 1].carries_marks;
}

// All ranks take rank 0's order of arrival for the next layout, so that buckets fill up one after the other.
void Reducer::exchange_order() {
  if (parameters_.size() == 0) return;
  const std::vector<int32_t> order =
      plan_.order_to_send(arrivals_.order(), options_.skip_unused ? used_.somewhere() : std::vector<bool>());
  std::vector<int32_t> sent;
  noting_failure(-1, "order of the gradients", [&] {
    sent = group_.broadcast(order, group_.control_device(parameters_.tensors().front()), "order of the gradients");
  });
  plan_.learn(sent);
}

}  // namespace ringdp
