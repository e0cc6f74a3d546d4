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

constexpr std::size_t kNamesShown = 20;

double seconds(std::chrono::steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kNamesShown); ++i) {
    if (i > 0) text.append(", ");
    text.append(names[i]);
  }
  if (names.size() > kNamesShown)
    text.append(", … ").append(std::to_string(names.size() - kNamesShown)).append(" more");
  return text;
}

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
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].ready) mark_ready(i);
  }
  if (!local()) {
    lock.unlock();  // callbacks of hooks may ask this reducer something
    wait_for_buckets();
    lock.lock();
    hand_out(missing);
  }
  for (auto& future : std::exchange(futures_, {})) future->wait();
  ++stats_.steps;
  stats_.backward_s = seconds(gradients_done - began_);
  stats_.exposed_wait_s = local() ? 0 : seconds(Clock::now() - gradients_done);
  stats_.total_backward_s += stats_.backward_s;
  stats_.total_exposed_wait_s += stats_.exposed_wait_s;
  active_ = false;
  if (!order_known_ && !local()) exchange_order();
}

void Reducer::wait_for_buckets() {
  for (Bucket& bucket : buckets_) {
    try {
      in_bucket(static_cast<int64_t>(bucket.index), bucket.name, step_, [&] { exchange_.wait(bucket); });
    } catch (...) {
      if (failed_.empty()) failed_ = current_error_text();
      throw;
    }
  }
}

void Reducer::hand_out(const std::vector<std::size_t>& missing) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<bool> used;
  if (!missing.empty()) used = used_somewhere();
  if (auto work = std::exchange(used_work_, nullptr)) work->wait();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.used && !used.empty() && !used[i]) continue;
    if (slot.sparse) {
      slot.parameter.mutable_grad() = buckets_[slot.bucket].buffer;
    } else if (slot.copy_back) {
      slot.parameter.mutable_grad().copy_(slot.view);
    } else if (!slot.used && !optimizer_in_backward_) {
      slot.parameter.mutable_grad() = slot.view;
    }
  }
  for (Bucket& bucket : buckets_) {
    if (!bucket.direct) continue;
    bucket.buffer.reset();
    bucket.gradients.reset();
    slots_[bucket.members.front()].view.reset();
  }
  if (!missing.empty()) warn_unused(missing, used);
}

// Asked for only where this rank lacks a gradient; on a device it waits for the device.
std::vector<bool> Reducer::used_somewhere() {
  std::vector<bool> used(slots_.size(), true);
  at::Tensor counts;
  if (used_work_) {
    used_work_->wait();
    counts = used_map_;
  } else if (buckets_.back().marks.defined()) {
    counts = at::real(buckets_.back().marks);
  } else {
    return used;
  }
  const at::Tensor flags = counts.gt(0).cpu().contiguous();
  const bool* flag = flags.const_data_ptr<bool>();
  for (std::size_t i = 0; i < used.size(); ++i) used[i] = flag[i];
  return used;
}

bool Reducer::sends_used_map() const {
  if (options_.unused == UnusedParameters::kForbidden || local()) return false;
  return !buckets_.empty() && !buckets_.back().marks.defined();
}

void Reducer::launch_used_map() {
  std::vector<int32_t> used(slots_.size());
  for (std::size_t i = 0; i < used.size(); ++i) used[i] = slots_[i].used ? 1 : 0;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  used_map_ = at::tensor(used, at::kInt).to(parameters_.front().device());
  const NamedScope scope("which parameters were used");
  std::vector<at::Tensor> tensors{used_map_};
  used_work_ = exchange_.group()->allreduce(tensors);
}

void Reducer::warn_unused(const std::vector<std::size_t>& missing, const std::vector<bool>& used) {
  if (options_.unused != UnusedParameters::kFinish || static_graph_ || std::exchange(warned_, true)) return;
  std::vector<std::string> here;
  std::vector<std::string> everywhere;
  for (std::size_t i : missing) (used[i] ? here : everywhere).push_back(names_[i]);
  unused_names_ = here;
  unused_names_.insert(unused_names_.end(), everywhere.begin(), everywhere.end());
  std::string text = "parameters without gradient in step " + std::to_string(step_) + " on rank " +
                     std::to_string(exchange_.group()->getRank()) + ".";
  if (!here.empty()) text += " Used on other ranks, so their mean counts zeros from this one: " + listed(here) + ".";
  if (!everywhere.empty()) text += " Used on no rank, so their .grad stays None: " + listed(everywhere) + ".";
  TORCH_WARN(text, " Said once; find_unused_parameters=True says that this is meant, False makes it an error.");
}

// Rank 0's order of arrival becomes everybody's, so that buckets fill up one after the other.
void Reducer::exchange_order() {
  order_known_ = true;
  std::vector<bool> seen(slots_.size(), false);
  std::vector<int32_t> order;
  for (std::size_t i : arrival_order_) {
    if (!seen[i]) order.push_back(static_cast<int32_t>(i));
    seen[i] = true;
  }
  for (std::size_t i = slots_.size(); i-- > 0;) {
    if (!seen[i]) order.push_back(static_cast<int32_t>(i));
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor sent = at::tensor(order, at::kInt).to(parameters_.front().device());
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
  std::vector<std::size_t> next(first, first + order.size());
  std::vector<std::size_t> sorted = next;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != i) throw Error(ErrorKind::kMismatch, "rank 0 sent an order of gradients that is no permutation");
  }
  next_order_ = std::move(next);
}

std::string Reducer::missing_text() const {
  std::string indices;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.ready && !(learned_graph_ && slot.arrivals_left > 0)) continue;
    indices.append(" ").append(std::to_string(i));
    names.push_back(names_[i]);
  }
  const std::string rank = std::to_string(exchange_.group()->getRank());
  return "Parameter indices which did not receive grad for rank " + rank + ":" + indices +
         "\nParameters which did not receive grad for rank " + rank + ": " + listed(names);
}

void Reducer::throw_if_unfinished() {
  if (!active_) return;
  const std::string head = "Expected to have finished reduction in the prior iteration before starting a new one. ";
  if (static_graph_) {
    TORCH_CHECK(
        false, head,
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
        "in first iteration, but then got unused in the second iteration. this is not compatible with "
        "static_graph set to True.\n",
        missing_text());
  }
  if (options_.unused == UnusedParameters::kForbidden) {
    TORCH_CHECK(
        false, head,
        "This error indicates that your module has parameters that were not used in producing loss. You can "
        "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
        "`torch.nn.parallel.DistributedDataParallel`, and by \nmaking sure all `forward` function outputs "
        "participate in calculating loss. \nIf you already have done the above, then the distributed data "
        "parallel module wasn't able to locate the output tensors in the return value of your module's `forward` "
        "function. Please include the loss function and the structure of the return value of `forward` of your "
        "module when reporting this issue (e.g. list, dict, iterable).\n",
        missing_text());
  }
  if (next_bucket_ > 0) {
    TORCH_CHECK(false, head, "A backward was left by an exception after ", next_bucket_, " of ", buckets_.size(),
                " buckets had been sent; the other ranks wait for the rest.\n", missing_text());
  }
  active_ = false;  // nothing had left: as if it had never begun
}

}  // namespace ringdp
