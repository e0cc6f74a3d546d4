#include "torch/reducer/backward_end.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "torch/backend/future_wait.h"

namespace ringdp {

void JoinShadow::set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks) {
  forward_work_ = std::move(work);
  divide_by_all_ranks_ = divide_by_all_ranks;
}

void JoinShadow::divide() {
  const auto work = std::exchange(forward_work_, nullptr);
  if (!work) return divide_by(0);
  work->wait();
  divide_by(divide_by_all_ranks_ ? layout_.group.ranks() : work->result()[0].item<int64_t>());
}

void JoinShadow::divide_by(int64_t ranks_with_input) {
  const int64_t before = layout_.group.divisor();
  layout_.group.set_divisor(ranks_with_input);
  if (before != ranks_with_input) layout_.reductions.set_divisor(ranks_with_input);
}

std::vector<c10d::GradBucket> JoinShadow::zero_buckets() {
  layout_.allocate();
  std::vector<c10d::GradBucket> result;
  for (const Bucket& bucket : layout_.store) {
    at::Tensor zeros = layout_.store.zeros(bucket.index, layout_.buckets.hooked(bucket));
    result.push_back(layout_.buckets.describe(bucket, std::move(zeros), layout_.store.size()));
  }
  return result;
}

FuturePointer JoinShadow::shadow(c10d::GradBucket& zeros, int64_t step) {
  TORCH_CHECK(zeros.getIndex() < layout_.store.size(), "bucket ", zeros.getIndex(), " is out of range: there are ",
              layout_.store.size());
  return layout_.buckets.shadow(layout_.store[zeros.getIndex()], zeros, step);
}

void JoinShadow::shadow_used_map() {
  if (layout_.sends_used_map()) used_.shadow();
}

void BackwardEnd::install_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  futures_.insert(futures_.end(), std::make_move_iterator(futures.begin()), std::make_move_iterator(futures.end()));
}

void BackwardEnd::wait_for(std::size_t first, std::size_t end) {
  for (std::size_t index = first; index < end; ++index) {
    Bucket& bucket = layout_.store[index];
    failure_.keeping_in(static_cast<int64_t>(index), bucket.name, [&] { layout_.buckets.wait(bucket); });
  }
}

void BackwardEnd::wait_for_sent() { wait_for(0, arrivals_.sending()); }

void BackwardEnd::wait_for_late() { wait_for(arrivals_.sending(), layout_.store.size()); }

// A hook's bucket has no room for marks, and its operations have ended by now.
void BackwardEnd::wait_for_used_map() {
  failure_.keeping_in(-1, "which parameters were used", [&] {
    if (layout_.calls_back() && layout_.sends_used_map()) used_.launch(/*with_input=*/true);
    used_.wait();
  });
}

void BackwardEnd::learn_used(const Missing& missing) {
  failure_.keeping_in(-1, "which parameters were used", [&] {
    if (layout_.calls_back() && layout_.sends_used_map() && !layout_.repair.on())
      used_.launch(/*with_input=*/true, backward_.forwards().note());
    used_.end_backward(layout_.store[layout_.plan.kept() - 1].marks, !missing.empty() || layout_.may_skip(),
                       backward_.step(), join_.joining());
  });
}

bool BackwardEnd::may_send_late() const { return layout_.plan.kept() < layout_.store.size(); }

// All ranks have read the same map.
void BackwardEnd::send_late() {
  times_.count_kept(layout_.plan);
  for (std::size_t index = layout_.plan.kept(); index < layout_.store.size(); ++index) {
    Bucket& bucket = layout_.store[index];
    const auto used = [&](std::size_t member) { return used_.somewhere().empty() || used_.somewhere()[member]; };
    const bool sent = index < arrivals_.sending();
    if (!sent && std::none_of(bucket.members.begin(), bucket.members.end(), used)) continue;
    times_.count_bucket(layout_.plan, index);
    if (!sent) filler_.send_late(bucket);
  }
}

HookVerdicts BackwardEnd::used_hooks() const {
  return HookVerdicts(layout_.reductions, layout_.store, backward_.step());
}

void BackwardEnd::ask_hooks(HookVerdicts& hooks) {
  failure_.keeping_in(-1, "announced before", [&] { layout_.buckets.follow_announcements(backward_.step()); });
  hooks.ask();
}

void BackwardEnd::hand_out(const Missing& missing, const HookVerdicts& hooks) {
  layout_.overflow.collect(layout_.store, backward_.step(), hooks, /*look_at_results=*/!layout_.buckets.has_hook());
  layout_.compression.commit(used_, layout_.overflow);
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (used_.used_somewhere(i)) layout_.store.hand_out(i, /*keep_none=*/arrivals_.used(i) || optimizer_in_backward_);
  }
  layout_.store.end_backward();
  failure_.keeping_in(-1, "which ranks lack gradients",
                      [&] { used_.warn(missing, backward_.step(), join_.joining()); });
}

void BackwardEnd::wait_for_futures() {
  for (auto& future : std::exchange(futures_, {})) {
    wait_until_complete(*future, std::chrono::milliseconds(0));
    future->wait();
  }
}

void BackwardEnd::count(StepTimes::Clock::time_point gradients_done, const Missing& missing) {
  int64_t missing_bytes = 0;
  for (std::size_t i : missing) missing_bytes += static_cast<int64_t>(layout_.plan.gradients()[i].bytes());
  times_.end(gradients_done, missing_bytes, layout_.local());
}

void BackwardEnd::shadow(const HookVerdicts& hooks) {
  used_.forget();
  layout_.overflow.collect(layout_.store, backward_.step(), hooks, /*look_at_results=*/false);
}

std::optional<std::vector<int32_t>> BackwardEnd::ask_for_order() {
  if (layout_.plan.order_known() || layout_.local() || layout_.parameters.size() == 0) return std::nullopt;
  std::vector<int32_t> order;
  failure_.keeping_in(-1, "order of the gradients",
                      [&] { order = layout_.exchange_order(arrivals_.order(), used_.somewhere()); });
  return order;
}

void BackwardEnd::learn_order(const std::optional<std::vector<int32_t>>& order) {
  if (order) layout_.plan.learn(*order);
}

}  // namespace ringdp
