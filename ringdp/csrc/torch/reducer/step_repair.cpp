#include "torch/reducer/step_repair.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>

#include <utility>

#include "base/stream_copy.h"
#include "torch/backend/process_group.h"

namespace ringdp {

StepRepair::StepRepair(ReducerGroup& group, BucketStore& store) : group_(group), store_(store) {
  const ProcessGroupRing* ring = group_.ring(c10::kCPU);
  if (ring != nullptr) elastic_ = ring->elastic();
}

// In the first step of a view some ranks make it again, at its end: so all ranks send then.
void StepRepair::begin_step() {
  if (!on()) return;
  group_.follow_view();
  view_ = elastic_->view();
  withholds_ = elastic_->first_unit();
  withheld_ = false;
  for (Kept& kept : kept_) kept.filled = false;
}

bool StepRepair::keep(const Bucket& bucket) {
  if (kept_.size() < store_.size()) kept_.resize(store_.size());
  Kept& kept = kept_[bucket.index];
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!kept.buffer.defined() || kept.buffer.numel() != bucket.buffer.numel() ||
      kept.buffer.scalar_type() != bucket.buffer.scalar_type())
    kept.buffer = at::empty_like(bucket.buffer);
  stream_copy(static_cast<std::byte*>(kept.buffer.mutable_data_ptr()),
              static_cast<const std::byte*>(bucket.buffer.const_data_ptr()), bucket.buffer.nbytes());
  kept.factor = bucket.factor;
  kept.filled = true;
  withheld_ = withheld_ || withholds_;
  return !withholds_;
}

void StepRepair::restore() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t index = 0; index < store_.size(); ++index) {
    Bucket& bucket = store_[index];
    if (const auto operation = std::exchange(bucket.operation, {}); operation.work) {
      try {
        operation.work->wait();
      } catch (const Error&) {  // its view is over
      }
    }
    if (index >= kept_.size() || !kept_[index].filled) continue;
    bucket.buffer.copy_(kept_[index].buffer);
    bucket.factor = kept_[index].factor;
  }
  group_.follow_view();
  view_ = elastic_->view();
  withheld_ = withholds_ = false;
}

}  // namespace ringdp
