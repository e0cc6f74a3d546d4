// The end of backward: what is missing, waiting, handing out, and the order for the next layout.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/reducer.h"
#include "torch/reducer_errors.h"

namespace ringdp {
namespace {

double seconds(std::chrono::steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

void Reducer::end_backward() {
  Lock lock(mutex_);
  if (!active_) return;
  const auto gradients_done = Clock::now();
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.ready && !learning_graph() && options_.unused == UnusedParameters::kForbidden && !static_graph_) {
      return;  // the next forward says so
    }
    if (learned_graph_ && slot.arrivals_left > 0) return;
    if (!slot.ready) settle(i);
    if (!slot.used) missing.push_back(i);
  }
  if (learning_graph()) learned_graph_ = true;
  HookMethods hook_methods;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].ready) mark_ready(i);
  }
  if (!local()) {
    lock.unlock();  // callbacks of hooks may ask this reducer something
    wait_for_buckets(0, sending_);
    lock.lock();
    used_ = {};
    if (calls_back() && sends_used_map()) launch_used_map(/*with_input=*/true);
    if (reads_used_map(!missing.empty())) read_used_map();
    // From the CPU it is waited for only where it is read, or a backward later: the device is not done, why should this be.
    if (options_.host_control) std::swap(used_work_, used_before_);
    if (auto work = std::exchange(used_work_, nullptr)) work->wait();
    if (kept_ < buckets_.size()) {
      count_traffic();
      send_late_buckets();
      lock.unlock();
      wait_for_buckets(sending_, buckets_.size());
      lock.lock();
    }
    lock.unlock();
    follow_announcements();
    hook_methods = ask_hook_methods();
    lock.lock();
    look_at_reports(hook_methods);
    commit_residuals();
    hand_out();
    tell_unused(missing);
  }
  for (auto& future : std::exchange(futures_, {})) future->wait();
  ++stats_.steps;
  note_times(gradients_done, missing);
  stats_.backward_s = seconds(gradients_done - began_);
  stats_.exposed_wait_s = local() ? 0 : seconds(Clock::now() - gradients_done);
  stats_.total_backward_s += stats_.backward_s;
  stats_.total_exposed_wait_s += stats_.exposed_wait_s;
  active_ = false;
  if (!order_known_ && !local()) exchange_order();
  lock.unlock();
  finish_hook_methods(hook_methods);
}

void Reducer::note_times(Clock::time_point gradients_done, const std::vector<std::size_t>& missing) {
  stats_.computed_ns = nanoseconds(gradients_done);
  stats_.finished_ns = nanoseconds(Clock::now());
  stats_.unused_bytes = 0;
  for (std::size_t i : missing) stats_.unused_bytes += static_cast<int64_t>(items_[i].numel * items_[i].element_bytes);
}

void Reducer::wait_for_buckets(std::size_t first, std::size_t end) {
  for (std::size_t index = first; index < end; ++index) {
    Bucket& bucket = buckets_[index];
    try {
      in_bucket(static_cast<int64_t>(bucket.index), bucket.name, step_, [&] { exchange_.wait(bucket); });
    } catch (...) {
      if (failed_.empty()) failed_ = current_error_text();
      throw;
    }
  }
}

void Reducer::follow_announcements() {
  try {
    in_bucket(-1, "announced before", step_, [&] { exchange_.follow_announcements(step_); });
  } catch (...) {
    if (failed_.empty()) failed_ = current_error_text();
    throw;
  }
}

// Buckets that had stayed at home, where some rank has a gradient for them after all. All ranks have read the same map.
void Reducer::send_late_buckets() {
  for (std::size_t index = kept_; index < buckets_.size(); ++index) {
    Bucket& bucket = buckets_[index];
    const auto used = [&](std::size_t member) { return used_.somewhere.empty() || used_.somewhere[member]; };
    const bool sent = index < sending_;
    if (!sent && std::none_of(bucket.members.begin(), bucket.members.end(), used)) continue;
    count_bucket(index);
    if (sent) continue;
    for (std::size_t member : bucket.members) {
      if (!slots_[member].used) settle(member, /*late=*/true);
    }
    launch(bucket);
  }
}

void Reducer::hand_out() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!used_somewhere(i)) continue;
    at::Tensor& grad = slot.parameter.mutable_grad();
    if (slot.sparse) {
      grad = buckets_[slot.bucket].buffer;
    } else if (slot.copy_back) {
      if (grad.defined()) grad.copy_(slot.view);  // a hook may have applied it and let it go
    } else if (!slot.used && !optimizer_in_backward_) {
      const bool own = slot.cast || (owns_gradient(i) && !slot.direct);
      grad = own ? slot.view.to(slot.dtype, /*non_blocking=*/false, /*copy=*/true) : slot.view;
    }
  }
  for (Bucket& bucket : buckets_) {
    if (!bucket.direct) continue;
    bucket.buffer.reset();
    bucket.gradients.reset();
    slots_[bucket.members.front()].view.reset();
  }
}

// On a device it waits for the device: there a rank that has all its gradients looks only now and then.
bool Reducer::reads_used_map(bool lacking) const {
  if (options_.unused == UnusedParameters::kForbidden) return false;
  return lacking || (options_.skip_unused && (kept_ < buckets_.size() || !order_known_)) || looks_for_others();
}

bool Reducer::looks_for_others() const {
  if (options_.unused != UnusedParameters::kFinish || static_graph_ || ranks_named_ || joining_) return false;
  const bool cheap = parameters_.front().is_cpu() && !options_.host_control;
  return group_size_ > 1 && (cheap || (step_ & (step_ - 1)) == 0);
}

void Reducer::read_used_map() {
  at::Tensor counts;
  if (used_work_) {
    std::exchange(used_work_, nullptr)->wait();
    counts = used_map_;
  } else {
    const at::Tensor& marks = buckets_[kept_ - 1].marks;
    if (!marks.defined()) return;
    counts = at::real(marks);
  }
  const at::Tensor flags = counts.gt(0).cpu().contiguous();
  const bool* flag = flags.const_data_ptr<bool>();
  used_.somewhere.assign(flag, flag + slots_.size());
  used_.somebody_lacks = flag[slots_.size()];
}

void Reducer::write_marks(const at::Tensor& marks) const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  marks.fill_(1);
  bool lacking = false;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].used) continue;
    marks.select(0, static_cast<int64_t>(i)).zero_();
    lacking = true;
  }
  if (!lacking) marks.select(0, static_cast<int64_t>(slots_.size())).zero_();
}

bool Reducer::sends_used_map() const {
  if (options_.unused == UnusedParameters::kForbidden || local()) return false;
  return !buckets_.empty() && !carries_marks(kept_ - 1);
}

void Reducer::launch_used_map(bool with_input) {
  std::vector<int32_t> used(slots_.size() + 1, 0);
  for (std::size_t i = 0; with_input && i < slots_.size(); ++i) (slots_[i].used ? used[i] : used.back()) = 1;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  used_map_ = at::tensor(used, at::kInt).to(control_device());
  const NamedScope scope("which parameters were used");
  std::vector<at::Tensor> tensors{used_map_};
  used_work_ = exchange_.group()->allreduce(tensors);
}

// Rank 0's order of arrival becomes everybody's, so that buckets fill up one after the other.
void Reducer::exchange_order() {
  order_known_ = true;
  if (slots_.empty()) return;
  std::vector<bool> seen(slots_.size(), false);
  std::vector<int32_t> order;
  for (std::size_t i : arrival_order_) {
    if (!seen[i]) order.push_back(static_cast<int32_t>(i));
    seen[i] = true;
  }
  for (std::size_t i = slots_.size(); i-- > 0;) {
    if (!seen[i]) order.push_back(static_cast<int32_t>(i));
  }
  if (options_.skip_unused && !used_.somewhere.empty()) {
    for (int32_t& i : order) {
      if (!used_.somewhere[static_cast<std::size_t>(i)]) i = ~i;  // negative: idle
    }
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor sent = at::tensor(order, at::kInt).to(control_device());
  try {
    in_bucket(-1, "order of the gradients", step_, [&] {
      const NamedScope scope("order of the gradients");
      std::vector<at::Tensor> tensors{sent};
      exchange_.group()->broadcast(tensors)->wait();
    });
  } catch (...) {
    failed_ = current_error_text();
    throw;
  }
  const at::Tensor received = sent.cpu().contiguous();
  const int32_t* first = received.const_data_ptr<int32_t>();
  std::vector<std::size_t> next;
  std::vector<bool> idle(slots_.size(), false);
  for (std::size_t position = 0; position < order.size(); ++position) {
    const int32_t entry = first[position];
    next.push_back(static_cast<std::size_t>(entry < 0 ? ~entry : entry));
    if (entry < 0 && next.back() < idle.size()) idle[next.back()] = true;
  }
  std::vector<std::size_t> sorted = next;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != i) throw Error(ErrorKind::kMismatch, "rank 0 sent an order of gradients that is no permutation");
  }
  set_idle(std::move(idle));
  next_order_ = std::move(next);
}

}  // namespace ringdp
