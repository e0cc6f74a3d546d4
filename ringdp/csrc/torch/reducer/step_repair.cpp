#include "torch/reducer/step_repair.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>

#include <utility>

#include "torch/backend/process_group.h"

namespace ringdp {
namespace {

bool fills_its_storage(const at::Tensor& buffer) {
  return buffer.storage_offset() == 0 && buffer.storage().nbytes() == buffer.nbytes();
}

}  // namespace

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

bool StepRepair::keep(Bucket& bucket) {
  if (kept_.size() < store_.size()) kept_.resize(store_.size());
  Kept& kept = kept_[bucket.index];
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor& buffer = bucket.buffer;
  if (!kept.spare.defined() || kept.spare.numel() != buffer.numel() || kept.spare.scalar_type() != buffer.scalar_type())
    kept.spare = at::empty_like(buffer);
  kept.copied = !fills_its_storage(buffer) || !fills_its_storage(kept.spare);
  kept.filled = true;
  bucket.result.reset();
  if (kept.copied)
    kept.spare.copy_(buffer);
  else
    bucket.result = kept.spare;
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
    if (index < kept_.size() && kept_[index].filled && kept_[index].copied) bucket.buffer.copy_(kept_[index].spare);
  }
  group_.follow_view();
  view_ = elastic_->view();
  withheld_ = withholds_ = false;
}

// Every view of the bucket, such as a .grad, sees its storage's new memory.
void StepRepair::accept() {
  for (std::size_t index = 0; index < kept_.size() && index < store_.size(); ++index) {
    Bucket& bucket = store_[index];
    const at::Tensor result = std::exchange(bucket.result, {});
    if (!kept_[index].filled || !result.defined()) continue;
    const auto* from = static_cast<const std::byte*>(bucket.buffer.const_data_ptr());
    const auto* to = static_cast<const std::byte*>(result.const_data_ptr());
    c10::StorageImpl& mine = *bucket.buffer.storage().unsafeGetStorageImpl();
    c10::StorageImpl& other = *result.storage().unsafeGetStorageImpl();
    other.set_data_ptr_noswap(mine.set_data_ptr(other.set_data_ptr({})));
    if (bucket.report && bucket.report->own >= from && bucket.report->own < from + bucket.buffer.nbytes())
      bucket.report->own += to - from;
  }
}

}  // namespace ringdp
