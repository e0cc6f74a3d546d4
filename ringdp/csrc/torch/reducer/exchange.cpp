#include "torch/reducer/exchange.h"

#include <set>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "codec/codec.h"
#include "collective/algorithm_table.h"
#include "torch/backend/buffers.h"
#include "torch/backend/process_group.h"
#include "torch/backend/watchdog.h"

namespace ringdp {

BackendWatchdog* BucketAnnouncer::watchdog(c10::DeviceType device) {
  auto found = watchdogs_.find(device);
  if (found == watchdogs_.end()) found = watchdogs_.emplace(device, watchdog_of(*group_.process_group(), device)).first;
  return found->second.get();
}

void BucketAnnouncer::announce(const Bucket& bucket, const at::Tensor& buffer, const ReductionStrategy& strategy) {
  BackendWatchdog* watchdog = this->watchdog(buffer.device().type());
  if (watchdog == nullptr) return;
  Announcement what;
  what.dtype = element_type(buffer.scalar_type(), "all_reduce");
  what.op = reduce_op_of(strategy.operation(buffer), "all_reduce");
  what.count = static_cast<uint64_t>(buffer.numel());
  what.layout_hash = strategy.layout_hash(bucket);
  announced_.push_back({bucket.sent_in, watchdog, watchdog->announce(what)});
}

void BucketAnnouncer::follow(int64_t step) {
  while (!announced_.empty()) {
    const Announced& first = announced_.front();
    if (!first.work->finished() && first.step > step - kLag) return;
    const Announced oldest = first;
    announced_.pop_front();
    oldest.watchdog->wait(*oldest.work);
  }
}

void BucketAnnouncer::throw_if_failed(c10::DeviceType device) {
  if (const BackendWatchdog* watchdog = this->watchdog(device)) watchdog->throw_if_failed();
}

void BucketAnnouncer::group_replaced() {
  announced_.clear();
  watchdogs_.clear();
}

namespace {

constexpr std::size_t kMostPeers = 8;

std::string algorithm_of(const Bucket& bucket, const GroupHandle& group) {
  if (bucket.operation.hook != nullptr) return "hook";
  const auto* native = dynamic_cast<const CodecReduction*>(bucket.reduction);
  if (native != nullptr && native->enabled() && !bucket.too_small) return std::string("compressed");
  return std::string(
      algorithm_name(group.algorithm_of_all_reduce(dtype_of(bucket.buffer, "all_reduce"), bucket.buffer.nbytes())));
}

std::string peers_text(const std::string& algorithm, int rank, int ranks) {
  std::set<int> peers;
  if (algorithm == "ring") {
    peers = {(rank + ranks - 1) % ranks, (rank + 1) % ranks};
  } else {
    for (int other = 0; other < ranks; ++other)
      if (other != rank) peers.insert(other);
  }
  if (peers.size() > kMostPeers) return std::to_string(peers.size()) + " ranks";
  std::string text;
  for (const int peer : peers) text += (text.empty() ? "" : ", ") + std::to_string(peer);
  return (peers.size() == 1 ? "rank " : "ranks ") + text;
}

}  // namespace

std::string describe_for_profiler(const Bucket& bucket, const ReducerGroup& group) {
  const ProcessGroupRing* ring = group.ring(bucket.buffer.device().type());
  const std::string size = std::to_string(bucket.buffer.nbytes() >> 10) + " KiB";
  if (ring == nullptr) return bucket.name + " (" + size + ")";
  const std::string algorithm = algorithm_of(bucket, *ring->group());
  return bucket.name + " (" + algorithm + ", " + size + ", " + peers_text(algorithm, group.rank(), group.ranks()) + ")";
}

void profile_moving(const Bucket& bucket, const ReducerGroup& group) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  c10::intrusive_ptr<c10::ivalue::Future> future =
      bucket.operation.future ? bucket.operation.future
                              : (bucket.operation.work ? bucket.operation.work->getFuture() : nullptr);
  if (!future) return;
  auto range = std::make_shared<at::RecordFunction>(std::move(*callbacks));
  if (!range->isActive()) return;
  range->_setAsync();
  range->before("ringdp move " + describe_for_profiler(bucket, group));
  future->addCallback([range](c10::ivalue::Future&) { range->end(); });
}

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
  if (bucket.sparse) {  // which a .grad may share
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    bucket.buffer = gradient_times(bucket.buffer, own);
    bucket.factors.clear();
    return;
  }
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

void StepFailure::throw_if_any() const {
  if (text_.empty()) return;
  ErrorContext context;
  context.cause = text_;
  context.advice = "the ranks no longer agree: leave the process group and restart from a checkpoint";
  throw Error(ErrorKind::kState, "reducing gradients failed in step " + std::to_string(step_) + ": " + text_, context);
}

Exchange::Exchange(ReducerGroup& on, Plan& plan, std::recursive_mutex& mutex)
    : group(on),
      weights(group, plan.parameters, plan.options.weighted),
      compression(plan.parameters, plan.reductions, group),
      overflow(plan.parameters),
      buckets(group, plan.parameters, compression, overflow),
      failure(mutex, step),
      plan_(plan) {
  if (const std::shared_ptr<ElasticGroup> elastic = group.elastic())
    failure.let_losses_pass([elastic] { return is_loss(elastic->group()->failure()); });
}

bool Exchange::local() const {
  return group.ranks() == 1 && !plan_.options.alone && !buckets.has_hook() && !group.elastic();
}

void Exchange::throw_if_group_failed() {
  const std::vector<at::Tensor>& parameters = plan_.parameters.tensors();
  if (!local() && !parameters.empty()) buckets.throw_if_failed(parameters.front().device().type());
}

std::vector<int32_t> Exchange::ask_for_order(const std::vector<std::size_t>& arrivals,
                                             const std::vector<bool>& used_somewhere) {
  std::vector<int32_t> order;
  if (plan_.buckets.order_known() || local() || plan_.parameters.size() == 0) return order;
  failure.keeping_in(-1, "order of the gradients",
                     [&] { plan_.exchange_order(group, arrivals, used_somewhere, order); });
  return order;
}

}  // namespace ringdp
