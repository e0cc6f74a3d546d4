// The reducer's settings, and the calls of torch's Join.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/backend/process_group.h"
#include "torch/reducer/reducer.h"

namespace ringdp {

void Reducer::register_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  const Lock lock(mutex_);
  refuse_hook_with_compression();
  bucket_reducer_.set_hook(std::move(hook));
  hook_was_set();
}

void Reducer::register_builtin_hook(BuiltinHook which) {
  const Lock lock(mutex_);
  refuse_hook_with_compression();
  bucket_reducer_.set_builtin_hook(which);
  hook_was_set();
}

// Also of hooks that RingDP itself registers, for mixed precision and optimizers in backward.
void Reducer::refuse_hook_with_compression() const {
  if (!reduction_plan_.reductions.empty()) throw Error(ErrorKind::kState, BucketReducer::kHookAndCompression);
}

// Buckets for hooks are laid out without marks, and a world of one has had none.
void Reducer::hook_was_set() {
  TORCH_CHECK(!backward_.active(), "communication hooks are registered between steps, not during backward");
  store_.drop();
  set_hooks();
}

void Reducer::set_hooks() {
  if (watches()) hooks_.attach(parameters_.tensors());
}

void Reducer::set_static_graph() {
  const Lock lock(mutex_);
  TORCH_CHECK(backward_.step() == 0,
              "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
              "constructed.");
  arrivals_.set_static_graph();
}

void Reducer::install_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  const Lock lock(mutex_);
  futures_.insert(futures_.end(), std::make_move_iterator(futures.begin()), std::make_move_iterator(futures.end()));
}

void Reducer::remove_hooks() {
  const Lock lock(mutex_);
  hooks_.remove();
}

void Reducer::set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks) {
  const Lock lock(mutex_);
  forward_work_ = std::move(work);
  divide_by_all_ranks_ = divide_by_all_ranks;
}

std::vector<c10d::GradBucket> Reducer::zero_buckets() {
  const Lock lock(mutex_);
  allocate();
  std::vector<c10d::GradBucket> result;
  for (Bucket& bucket : store_) {
    at::Tensor zeros = store_.zeros(bucket.index, bucket_reducer_.hook_of(bucket) != nullptr);
    result.push_back(bucket_reducer_.describe(bucket, std::move(zeros), store_.size(), parameters_.tensors()));
  }
  return result;
}

c10::intrusive_ptr<c10::ivalue::Future> Reducer::shadow(c10d::GradBucket& bucket) {
  const Lock lock(mutex_);
  TORCH_CHECK(bucket.getIndex() < store_.size(), "bucket ", bucket.getIndex(), " is out of range: there are ",
              store_.size());
  Bucket& shadowed = store_[bucket.getIndex()];
  const NamedScope scope(shadowed.name);  // the other ranks' operation has this name
  // Zeros, and no error feedback: this rank's residuals wait until it has input again.
  list_sections(shadowed, bucket.getBuffer(), /*with_residuals=*/false);
  shadowed.sent_in = backward_.step();
  return bucket_reducer_.shadow(shadowed, bucket);
}

void Reducer::shadow_used_map() {
  const Lock lock(mutex_);
  if (!sends_used_map()) return;
  used_.shadow();
}

void Reducer::shadow_end_of_backward() {
  const HookReductions hook_reductions = ask_hook_reductions();
  {
    const Lock lock(mutex_);
    used_.forget();
    look_at_reports(hook_reductions);
    if (!plan_.order_known() && !local()) exchange_order();
  }
  finish_hook_reductions(hook_reductions);
}

void Reducer::reset() {
  const Lock lock(mutex_);
  failure_.clear();
  backward_.reset();
  plan_.forget_learned();
  arrivals_.forget_graph();
  forward_work_ = nullptr;
  used_.drop_operations();
  futures_.clear();
  for (Bucket& bucket : store_) {
    bucket.work = nullptr;
    bucket.future = nullptr;
  }
}

void Reducer::set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared) {
  const Lock lock(mutex_);
  const bool other_size = group_.replace(std::move(group), average, names_compared);
  bucket_reducer_.group_replaced();
  if (!reduction_plan_.reductions.empty()) {
    check_reductions(reduction_plan_);
    if (other_size) residuals_.clear();  // other ranks own their parts
    lay_out_again();
  }
  set_hooks();
}

std::vector<std::size_t> Reducer::arrivals() {
  const Lock lock(mutex_);
  return arrivals_.order();
}

std::string Reducer::error() {
  const Lock lock(mutex_);
  return failure_.thrown();
}

void Reducer::note_error(const std::string& text) {
  const Lock lock(mutex_);
  failure_.note_thrown(text);
}

ReducerStats Reducer::stats() {
  const Lock lock(mutex_);
  return stats_;
}

std::vector<std::vector<std::size_t>> Reducer::layout() {
  const Lock lock(mutex_);
  return plan_.buckets();
}

std::vector<std::size_t> Reducer::bucket_bytes() {
  const Lock lock(mutex_);
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < plan_.buckets().size(); ++i) result.push_back(plan_.bytes(i));
  return result;
}

std::vector<std::string> Reducer::bucket_names() {
  const Lock lock(mutex_);
  std::vector<std::string> result;
  for (std::size_t i = 0; i < plan_.buckets().size(); ++i)
    result.push_back(describe_bucket(i, plan_.buckets()[i], parameters_.names()));
  return result;
}

}  // namespace ringdp
