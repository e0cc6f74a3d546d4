// Parameters that were frozen or unfrozen since the last layout: the ranks agree, then hooks and buckets are made anew.
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/reducer.h"
#include "torch/reducer_errors.h"
#include "torch/reducer_text.h"

namespace ringdp {
namespace {

constexpr uint8_t kTrains = 1;
constexpr uint8_t kLeftOver = 2;  // frozen, with gradients that were not averaged

}  // namespace

void Reducer::follow_requires_grad() {
  const bool changed = watch_.changed();
  // module.double() and the like give parameters other data, which hooks and buckets no longer fit. All ranks do that in
  // the same place, as they do the forward, and their modules were alike.
  bool other_data = false;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& parameter = slots_[i].parameter;
    other_data |=
        parameter.scalar_type() != slots_[i].dtype || static_cast<std::size_t>(parameter.numel()) != items_[i].numel;
  }
  if (!changed && !other_data) return;
  const std::vector<std::size_t> frozen = watch_.frozen();
  try {
    if (changed && group_size_ > 1) average_left_over(agree_about(frozen));
  } catch (...) {
    failed_ = current_error_text();
    throw;
  }
  for (Slot& slot : slots_) {  // a frozen parameter's .grad would keep the bucket's memory
    const at::Tensor& grad = slot.parameter.grad();
    const bool leaves = std::binary_search(frozen.begin(), frozen.end(), slot.watched);
    if (leaves && grad.defined() && grad.is_same(slot.view)) leave_bucket(slot.view);
  }
  hooks_.reset();
  watch_.accept();
  take_trainable();
  drop_memory();
  plan_in_reverse();
  next_order_.reset();
  arrival_order_.clear();
  order_known_ = rebuilt_ = learned_graph_ = false;
  set_hooks();
}

// The parameters among `frozen` that some rank has gradients for which were not averaged.
std::vector<std::size_t> Reducer::agree_about(const std::vector<std::size_t>& frozen) {
  std::vector<uint8_t> mine(watch_.size());
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = watch_[i].tensor.requires_grad() ? kTrains : 0;
  for (const Slot& slot : slots_) {
    if (slot.local && slot.parameter.grad().defined()) mine[slot.watched] |= kLeftOver;
  }
  const std::string change = watch_.describe_change();
  std::vector<std::vector<uint8_t>> all;
  try {
    all = gather_bytes(*exchange_.group(), mine,
                       options_.host_control ? c10::Device(c10::kCPU) : watch_[0].tensor.device(), change);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMismatch) throw;
    ErrorContext context = error.context();
    context.name = change;
    context.advice = "freeze and unfreeze the same parameters on all ranks, before the same forward";
    throw Error(error.kind(), "before this forward " + change + ", and not all ranks did the same: " + error.what(),
                context);
  }
  throw_where_they_differ(all);
  std::vector<std::size_t> left_over;
  for (std::size_t i : frozen) {
    if (std::any_of(all.begin(), all.end(), [i](const auto& rank) { return (rank[i] & kLeftOver) != 0; }))
      left_over.push_back(i);
  }
  return left_over;
}

void Reducer::throw_where_they_differ(const std::vector<std::vector<uint8_t>>& all) const {
  RankTable table;
  for (std::size_t i = 0; i < watch_.size(); ++i) {
    std::vector<bool> with;
    for (const auto& rank : all) with.push_back((rank[i] & kTrains) != 0);
    if (std::adjacent_find(with.begin(), with.end(), std::not_equal_to<>()) != with.end())
      table.add(with, watch_[i].name);
  }
  if (table.rows().empty()) return;
  std::string text = "the ranks disagree about requires_grad:";
  for (const RankTable::Row& row : table.rows()) {
    text += " " + listed(row.names) + (row.names.size() == 1 ? " requires" : " require") + " grad on " +
            describe_ranks(row.ranks, true) + " and not on " + describe_ranks(row.ranks, false) + ".";
  }
  ErrorContext context;
  context.rank = exchange_.group()->getRank();
  context.name = table.rows().front().names.front();
  context.advice = "freeze and unfreeze the same parameters on all ranks, before the same forward";
  throw Error(ErrorKind::kMismatch, text + " Freeze and unfreeze the same on all ranks, before the same forward.",
              context);
}

// Gradients accumulated under no_sync are still to be averaged once; the optimizer may apply them.
void Reducer::average_left_over(const std::vector<std::size_t>& watched) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!std::binary_search(watched.begin(), watched.end(), slot.watched)) continue;
    const std::vector<std::size_t> members{i};
    Bucket bucket;
    bucket.plan = plan_bucket(items_, members);
    bucket.dtype = bucket_dtype(slot.watched);
    allocate_bucket(bucket, slot.parameter.device(), 0);
    const at::Tensor mean = gradient_view(bucket, 0, slot.parameter);
    at::Tensor& grad = slot.parameter.mutable_grad();
    if (grad.defined()) copy_gradient(mean, grad);
    {
      const NamedScope scope("last gradient of " + names_[i]);
      exchange_.average(bucket.buffer);
    }
    if (slot.sparse) {
      grad = mean.to_sparse(1);
    } else if (grad.defined()) {
      grad.copy_(mean);
    } else {
      grad = mean.to(slot.dtype);
    }
    slot.local = false;
  }
}

}  // namespace ringdp
