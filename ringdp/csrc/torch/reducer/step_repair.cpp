#include "torch/reducer/step_repair.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>

#include <chrono>
#include <utility>

#include "base/error.h"
#include "torch/backend/future_wait.h"
#include "torch/backend/process_group.h"

namespace ringdp {
namespace {

constexpr std::chrono::milliseconds kHookGrace{10'000};  // for a hook to end after its operation has failed

bool fills_its_storage(const at::Tensor& buffer) {
  return buffer.storage_offset() == 0 && buffer.storage().nbytes() == buffer.nbytes();
}

}  // namespace

StepRepair::StepRepair(ReducerGroup& group, BucketStore& store, GradientCompression& compression,
                       BucketReducer& buckets, bool weighted)
    : group_(group), store_(store), compression_(compression), buckets_(buckets), weighted_(weighted) {
  const ProcessGroupRing* ring = group_.ring(c10::kCPU);
  if (ring == nullptr) return;
  elastic_ = ring->elastic();
  backward_ = ring->backward_unit();
}

void StepRepair::follow_members() {
  if (!on()) return;
  group_.follow_view();
  compression_.follow_members();
}

void StepRepair::as_unit(const std::string& what, const std::function<void()>& body) {
  if (!on()) return body();
  const UnitScope scope;
  for (bool counts = false; !counts;) {
    const uint64_t unit = elastic_->begin_unit({.what = what});
    follow_members();
    const uint64_t view = elastic_->view();
    try {
      body();
      elastic_->commit(unit);
      return;
    } catch (const Error& error) {
      if (!is_loss(error)) throw;
    }
    counts = elastic_->change(unit, view) == ElasticGroup::Outcome::kCounts;
  }
  follow_members();
}

// In the first step of a view some ranks repeat it, and send at its end: so all ranks do.
void StepRepair::begin_step() {
  if (!on()) return;
  follow_members();
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
    kept.spare = at::zeros_like(buffer);  // a codec does not write between two gradients
  kept.copied =
      !fills_its_storage(buffer) || !fills_its_storage(kept.spare) || !buckets_.leaves_input(bucket, weighted_);
  kept.filled = true;
  bucket.result.reset();
  bucket.in_result = false;
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
    bucket.in_result = false;
    const BucketOperation operation = std::exchange(bucket.operation, {});
    try {
      if (operation.work) operation.work->wait();
      if (operation.future) wait_until_complete(*operation.future, kHookGrace);
    } catch (const std::exception&) {  // the view has changed
    }
    if (index < kept_.size() && kept_[index].filled && kept_[index].copied) bucket.buffer.copy_(kept_[index].spare);
  }
  follow_members();
  view_ = elastic_->view();
  withheld_ = withholds_ = false;
}

// Views of the bucket, such as a .grad, follow their storage's new memory; arrays and raw addresses do not.
void StepRepair::accept() {
  for (std::size_t index = 0; index < kept_.size() && index < store_.size(); ++index) {
    Bucket& bucket = store_[index];
    const at::Tensor result = std::exchange(bucket.result, {});
    if (!kept_[index].filled || !result.defined()) continue;
    const auto* from = static_cast<const std::byte*>(bucket.buffer.const_data_ptr());
    const auto* to = static_cast<const std::byte*>(result.const_data_ptr());
    const auto move_report = [&](const std::byte* of, std::ptrdiff_t by) {
      if (bucket.report && bucket.report->own >= of && bucket.report->own < of + bucket.buffer.nbytes())
        bucket.report->own += by;
    };
    if (store_.address_known(bucket)) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      bucket.buffer.copy_(result);
      move_report(to, from - to);
      continue;
    }
    c10::StorageImpl& mine = *bucket.buffer.storage().unsafeGetStorageImpl();
    c10::StorageImpl& other = *result.storage().unsafeGetStorageImpl();
    other.set_data_ptr_noswap(mine.set_data_ptr(other.set_data_ptr({})));
    move_report(from, to - from);
  }
}

}  // namespace ringdp
