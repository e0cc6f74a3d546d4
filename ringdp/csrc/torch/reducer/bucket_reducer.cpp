#include "torch/reducer/bucket_reducer.h"

#include <utility>

#include "base/naming.h"
#include "torch/backend/watchdog.h"
#include "torch/reducer/profiled_bucket.h"

namespace ringdp {

using Clock = ReductionStrategy::Clock;

// With a disabled reduction the buckets are exact.
ReductionStrategy& BucketReducer::strategy_of(const Bucket& bucket) {
  if (bucket.operation.hook != nullptr) return hook_;
  if (bucket.reduction == nullptr) return exact_;
  if (is_auto(bucket.reduction)) return residual_;
  if (dynamic_cast<const CodecReduction*>(bucket.reduction) != nullptr && bucket.reduction->enabled())
    return bucket.too_small ? static_cast<ReductionStrategy&>(residual_) : codec_;
  return exact_;
}

// A codec's gradients are multiplied in place, and residuals are added there; a device's memory goes through the host.
bool BucketReducer::leaves_input(const Bucket& bucket, bool weighted) {
  if (bucket.sparse || !bucket.buffer.is_cpu() || hook_.hook_of(bucket) != nullptr) return false;
  const ReductionStrategy& strategy = strategy_of(bucket);
  return &strategy == &exact_ || (&strategy == &codec_ && !weighted && !compression_.exchanges_codes());
}

// The common part of launch and shadow, before the operation.
ReductionStrategy& BucketReducer::begin(Bucket& bucket, const at::Tensor& buffer, int64_t step, bool shadowing) {
  bucket.operation.hook = hook_.hook_of(bucket);
  ReductionStrategy& strategy = strategy_of(bucket);
  bucket.sent_in = step;
  bucket.codes = {};
  bucket.report = nullptr;
  if (shadowing) bucket.factors.clear();
  if (!bucket.factors.empty()) multiply(bucket, strategy);
  strategy.prepare(bucket, buffer, shadowing);
  if (!shadowing && !bucket.sparse) wait_for_streams(bucket);
  if (ReductionStrategy* before = std::exchange(last_, &strategy)) before->wait_until_issued(buffer);
  return strategy;
}

// Always writes zeros, since the old values may not be finite.
void BucketReducer::multiply(Bucket& bucket, const ReductionStrategy& strategy) const {
  const double own = bucket.factors[static_cast<std::size_t>(group_.rank())];
  const bool later = bucket.direct && strategy.multiplies(bucket);
  at::Tensor gradients = bucket.gradients;
  if (bucket.result.defined()) {
    copy_gradient(bucket.result, bucket.buffer);
    bucket.in_result = true;
    gradients = bucket.result.narrow(0, 0, gradients.numel());
  }
  if (!later || own == 0) {
    wait_for_streams(bucket);
    multiply_gradient(gradients, own);
  }
  if (!later) bucket.factors.clear();
}

void BucketReducer::launch(Bucket& bucket, int64_t step, std::size_t bucket_count, const std::string& note) {
  ReductionStrategy& strategy = begin(bucket, bucket.buffer, step, /*shadowing=*/false);
  const NamedScope scope(note.empty() ? bucket.name : bucket.name + note);
  bucket.times = {Clock::now(), std::make_shared<std::atomic<Clock::time_point>>()};
  announcer_.announce(bucket, bucket.buffer, strategy);
  strategy.launch(bucket, bucket_count);
  bucket.operation.strategy = &strategy;
  profile_moving(bucket, group_);
}

void BucketReducer::wait(Bucket& bucket) {
  const auto begin = Clock::now();
  at::RecordFunction waiting(at::RecordScope::USER_SCOPE);
  if (waiting.isActive()) waiting.before("ringdp wait " + describe_for_profiler(bucket, group_));
  BucketOperation operation = std::exchange(bucket.operation, {});
  if (operation.strategy == nullptr) return;
  BackendWatchdog* watchdog = announcer_.watchdog(bucket.buffer.device().type());
  auto done = operation.strategy->wait(bucket, operation, watchdog);
  const auto now = Clock::now();
  if (done == Clock::time_point()) done = now;
  bucket.times.seconds = seconds(done - bucket.times.launched);
  bucket.times.exposed_s = seconds(now - begin);
  operation.strategy->finish(bucket, operation);
}

FuturePointer BucketReducer::shadow(Bucket& bucket, c10d::GradBucket& zeros, int64_t step) {
  const NamedScope scope(bucket.name);  // the name of the other ranks' operation
  ReductionStrategy& strategy = begin(bucket, zeros.getBuffer(), step, /*shadowing=*/true);
  announcer_.announce(bucket, zeros.getBuffer(), strategy);
  return strategy.shadow(bucket, zeros);
}

}  // namespace ringdp
