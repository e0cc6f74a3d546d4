#include "torch/reducer/reduction_strategy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_real.h>

#include <exception>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "codec/plugin.h"
#include "engine/completion.h"
#include "torch/backend/c10d_compressed_all_reduce.h"
#include "torch/backend/future_wait.h"
#include "torch/backend/process_group.h"
#include "torch/backend/watchdog.h"

namespace ringdp {
namespace {

using OpType = c10d::ReduceOp::RedOpType;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

constexpr std::chrono::milliseconds kHookGrace{500};

void check_result(const at::Tensor& result, const Bucket& bucket) {
  if (!result.defined())
    throw Error(ErrorKind::kValue, "the communication hook completed its future with None, not with the bucket's mean");
  if (!bucket.sparse && result.numel() != bucket.gradients.numel())
    throw Error(ErrorKind::kValue, "the communication hook completed its future with " +
                                       std::to_string(result.numel()) + " elements for a bucket of " +
                                       std::to_string(bucket.gradients.numel()));
}

// ring's own works check signals while they wait; gloo's do not.
void look_at_signals_until_done(c10d::Work& work) {
  if (dynamic_cast<RingWork*>(&work) != nullptr) return;
  FuturePointer future;
  try {
    future = work.getFuture();
  } catch (const c10::Error&) {  // not every backend has futures
    return;
  }
  if (future) wait_until_complete(*future, std::chrono::milliseconds(0));
}

at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

const CodecReduction& codec_of(const Bucket& bucket) { return static_cast<const CodecReduction&>(*bucket.reduction); }

class Builtin final : public c10d::CommHookInterface {
 public:
  Builtin(c10::intrusive_ptr<c10d::ProcessGroup> group, BuiltinHook which) : group_(std::move(group)), which_(which) {}

  FuturePointer runHook(c10d::GradBucket& bucket) override {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor buffer = bucket.getBuffer();
    at::Tensor sent = which_ == BuiltinHook::kFp16Compress ? buffer.to(at::kHalf) : buffer;
    sent.div_(group_->getSize());
    std::vector<at::Tensor> tensors{as_real(sent)};
    auto future = group_->allreduce(tensors)->getFuture();
    return future->then(
        [sent, buffer](c10::ivalue::Future& done) -> c10::IValue {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          at::AutoDispatchBelowADInplaceOrView below;
          if (!sent.is_same(buffer)) buffer.copy_(sent);
          return buffer;
        },
        c10::TensorType::get());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const BuiltinHook which_;
};

}  // namespace

ReductionStrategy::Clock::time_point ReductionStrategy::wait(Bucket& bucket, BucketOperation& operation,
                                                             BackendWatchdog* watchdog) {
  const WorkPointer& work = operation.work;
  if (watchdog != nullptr)
    watchdog->wait_for([&] { return work->getFuture(); });
  else if (bucket.buffer.is_cpu())
    look_at_signals_until_done(*work);
  work->wait();
  const auto* ring_work = dynamic_cast<const RingWork*>(work.get());
  return ring_work != nullptr ? ring_work->marked_at() : Clock::time_point();
}

// ---- Exact.

OpType ExactStrategy::operation(const at::Tensor& buffer) const {
  return group_.averages(buffer) ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
}

// In an all-reduce of ring: without an extra pass over memory for large buckets.
bool ExactStrategy::multiplies(const Bucket& bucket) const {
  const c10::ScalarType type = bucket.gradients.scalar_type();
  return (type == at::kFloat || type == at::kDouble) && operation(bucket.gradients) == c10d::ReduceOp::AVG &&
         group_.ring(bucket.gradients.device().type()) != nullptr;
}

void ExactStrategy::launch(Bucket& bucket, std::size_t /*bucket_count*/) {
  bucket.report = report_for(bucket.buffer);
  std::vector<double> factors = std::exchange(bucket.factors, {});
  if (!bucket.result.defined()) {
    bucket.operation.work = mean(bucket.buffer, bucket.report, std::move(factors));
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ProcessGroupRing* ring = group_.ring(bucket.buffer.device().type());
  if (ring != nullptr && !bucket.in_result && operation(bucket.buffer) == c10d::ReduceOp::AVG) {
    bucket.operation.work = ring->all_reduce_watched(as_real(bucket.result), c10d::ReduceOp::AVG, bucket.report, {},
                                                     as_real(bucket.buffer));
  } else {
    if (!bucket.in_result) bucket.result.copy_(bucket.buffer);
    bucket.operation.work = mean(bucket.result, bucket.report, std::move(factors));
  }
}

FuturePointer ExactStrategy::shadow(Bucket& bucket, c10d::GradBucket& zeros) {
  bucket.report = report_for(zeros.getBuffer());
  return all_reduce(zeros.getBuffer(), c10d::ReduceOp::SUM, bucket.report)->getFuture();
}

void ExactStrategy::average(const at::Tensor& buffer) {
  group_.set_divisor(0);
  group_.wait(*mean(buffer, nullptr), buffer.device());
}

FuturePointer ExactStrategy::sum(const c10d::GradBucket& bucket) {
  return all_reduce(bucket.getBuffer(), c10d::ReduceOp::SUM, nullptr)->getFuture();
}

WorkPointer ExactStrategy::mean(at::Tensor buffer, const std::shared_ptr<FiniteReport>& report,
                                std::vector<double> factors) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const OpType op = operation(buffer);
  // Before the sum, as in torch's DDP, for the same bits.
  const int64_t divisor = op == c10d::ReduceOp::AVG ? 1 : group_.ranks_with_input();
  if (divisor != 1) buffer.mul_(1.0 / static_cast<double>(divisor));
  return all_reduce(buffer, op, report, std::move(factors));
}

WorkPointer ExactStrategy::all_reduce(const at::Tensor& buffer, OpType op, const std::shared_ptr<FiniteReport>& report,
                                      std::vector<double> factors) {
  std::vector<at::Tensor> tensors{as_real(buffer)};
  if (report || !factors.empty())
    return group_.ring(buffer.device().type())->all_reduce_watched(tensors[0], op, report, std::move(factors));
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return group_.process_group()->allreduce(tensors, options);
}

// The check takes no extra pass over memory in ring's operations.
std::shared_ptr<FiniteReport> ExactStrategy::report_for(const at::Tensor& buffer) const {
  const bool floating = buffer.is_floating_point() || buffer.is_complex();
  if (!overflow_.watches() || buffer.is_sparse() || !floating || !group_.ring(buffer.device().type())) return nullptr;
  return std::make_shared<FiniteReport>();
}

void ResidualStrategy::prepare(Bucket& bucket, const at::Tensor& /*buffer*/, bool shadowing) {
  if (shadowing) return;
  wait_for_streams(bucket);
  compression_.add_residuals(bucket);
}

// ---- Codecs.

// A rank that has run out of input sends zeros without error feedback: its residuals are kept until it has input
// again.
void CodecStrategy::prepare(Bucket& bucket, const at::Tensor& buffer, bool shadowing) {
  compression_.list_sections(bucket, codec_of(bucket), buffer, /*with_residuals=*/!shadowing);
  if (shadowing || buffer.is_cpu()) return;
  // The kernels that encode on a device set a flag there if a value was not finite.
  const OverflowReport::Flag& flag = overflow_.flag_on(buffer.device());
  bucket.codes.non_finite = flag.seen;
  bucket.streams.push_back(flag.made_on);
}

OpType CodecStrategy::operation(const at::Tensor& /*buffer*/) const { return c10d::ReduceOp::AVG; }

uint64_t CodecStrategy::layout_hash(const Bucket& bucket) const {
  uint64_t hash = 0;
  for (const CompressedSection& section : bucket.codes.sections)
    hash = hash_mix(hash_mix(hash, section.count), section.owner_offset);
  return hash_mix(hash_mix(hash, codec_identity(codec_of(bucket).codec())),
                  static_cast<uint64_t>(group_.ranks_with_input()));
}

void CodecStrategy::launch(Bucket& bucket, std::size_t /*bucket_count*/) {
  bucket.operation.work = all_reduce(bucket, bucket.buffer);
}

FuturePointer CodecStrategy::shadow(Bucket& bucket, c10d::GradBucket& zeros) {
  return all_reduce(bucket, zeros.getBuffer())->getFuture();
}

WorkPointer CodecStrategy::all_reduce(Bucket& bucket, at::Tensor buffer) {
  const bool exchanging = compression_.exchanges_codes();
  bucket.report = exchanging && !buffer.is_cpu() ? nullptr : std::make_shared<FiniteReport>();
  Compression compression;
  compression.codec = codec_of(bucket).codec();
  compression.loss_scale = compression_.loss_scale();
  compression.divisor = static_cast<std::size_t>(group_.ranks_with_input());
  if (exchanging) return all_reduce_over_c10d(bucket, std::move(buffer), compression);
  ProcessGroupRing* ring = group_.ring(buffer.device().type());
  std::vector<at::Tensor> kept = bucket.codes.residuals;
  if (bucket.result.defined()) kept.push_back(bucket.result);
  return ring->all_reduce_compressed(std::move(buffer), bucket.codes.sections, compression, bucket.report,
                                     std::move(kept));
}

WorkPointer CodecStrategy::all_reduce_over_c10d(Bucket& bucket, at::Tensor buffer, const Compression& compression) {
  C10dCompressedAllReduce::Call call;
  call.group = group_.process_group();
  call.buffer = std::move(buffer);
  for (std::size_t i = 0; i < bucket.codes.sections.size(); ++i) {
    const CompressedSection& section = bucket.codes.sections[i];
    call.sections.push_back({section.x, section.count, section.owner_offset, {}});
    if (i < bucket.codes.feedback.size()) call.sections.back().feedback = bucket.codes.feedback[i];
  }
  call.compression = compression;
  call.kept = bucket.codes.residuals;
  call.non_finite = bucket.codes.non_finite;
  call.report = bucket.report;
  last_ = C10dCompressedAllReduce::begin(std::move(call));
  return last_->work();
}

void CodecStrategy::wait_until_issued(const at::Tensor& next) {
  const auto before = std::exchange(last_, nullptr);
  if (before && group_.ring(next.device().type()) == nullptr) before->wait_until_issued();
}

// ---- Hooks.

void HookStrategy::set_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  TORCH_CHECK(hook_ == nullptr, "register_comm_hook or register_builtin_comm_hook can only be called once.");
  hook_ = std::move(hook);
}

std::unique_ptr<c10d::CommHookInterface> make_builtin_hook(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                           BuiltinHook which) {
  return std::make_unique<Builtin>(std::move(group), which);
}

c10d::CommHookInterface* HookStrategy::hook_of(const Bucket& bucket) const {
  if (bucket.reduction == nullptr) return hook_.get();
  auto* reduction = dynamic_cast<HookReduction*>(bucket.reduction);
  return reduction != nullptr && reduction->enabled() ? &reduction->hook() : nullptr;
}

c10d::GradBucket HookStrategy::describe(const Bucket& bucket, at::Tensor buffer, std::size_t bucket_count) const {
  std::vector<c10::IntArrayRef> shapes;
  std::vector<at::Tensor> members;
  shapes.reserve(bucket.members.size());
  members.reserve(bucket.members.size());
  for (std::size_t member : bucket.members) {
    shapes.push_back(parameters_.tensors()[member].sizes());
    members.push_back(parameters_.tensors()[member]);
  }
  return c10d::GradBucket(bucket.index, bucket_count, std::move(buffer), bucket.memory.offsets, bucket.memory.lengths,
                          std::move(shapes), std::move(members), std::nullopt);
}

OpType HookStrategy::operation(const at::Tensor& /*buffer*/) const { return c10d::ReduceOp::SUM; }

void HookStrategy::launch(Bucket& bucket, std::size_t bucket_count) {
  c10d::GradBucket described = describe(bucket, bucket.sparse ? bucket.buffer : bucket.gradients, bucket_count);
  const CallbackGate gate;  // until the hook has attached its callbacks
  bucket.operation.future = bucket.operation.hook->runHook(described);
  bucket.operation.future->addCallback([done = bucket.times.done](c10::ivalue::Future&) { *done = Clock::now(); });
}

// The operations of the hook time out first, because their errors name the ranks that are missing.
ReductionStrategy::Clock::time_point HookStrategy::wait(Bucket& bucket, BucketOperation& operation,
                                                        BackendWatchdog* watchdog) {
  c10::ivalue::Future& future = *operation.future;
  const std::chrono::milliseconds limit = timeout_of(*group_.process_group(), bucket.buffer.device().type());
  const auto look = [&] {
    if (watchdog != nullptr) watchdog->throw_if_failed();
  };
  if (!wait_until_complete(future, limit.count() > 0 ? limit + kHookGrace : limit, look))
    throw_late_hook(bucket, limit);
  if (watchdog != nullptr) watchdog->wait_for([&] { return operation.future; });
  future.wait();
  return bucket.times.done->load();
}

void HookStrategy::finish(Bucket& bucket, BucketOperation& operation) {
  if (operation.future->hasError()) std::rethrow_exception(operation.future->exception_ptr());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor result = operation.hook->parseHookResult(operation.future->value());
  check_result(result, bucket);
  if (bucket.sparse) {
    bucket.buffer = result;
  } else if (result.data_ptr() != bucket.gradients.data_ptr() ||
             result.scalar_type() != bucket.gradients.scalar_type()) {
    bucket.gradients.copy_(result.reshape(bucket.gradients.sizes()));
  }
}

FuturePointer HookStrategy::shadow(Bucket& bucket, c10d::GradBucket& zeros) {
  const CallbackGate gate;
  return bucket.operation.hook->runHook(zeros);
}

void HookStrategy::throw_late_hook(const Bucket& bucket, std::chrono::milliseconds limit) const {
  const bool users = bucket.reduction == nullptr;
  ErrorContext context;
  context.rank = group_.rank();
  context.cause = users ? "the communication hook did not complete its future" : "the compressor did not end";
  context.advice = users ? "a hook has to call set_result or set_exception on every path, also in callbacks and "
                           "threads that raise; if it is only slow, give a longer timeout"
                         : "check what compress and decompress are doing; if they are only slow, give a longer timeout";
  throw Error(ErrorKind::kTimeout,
              context.cause + " on rank " + std::to_string(context.rank) + ": Timed out after " +
                  std::to_string(limit.count()) + " ms; " + context.advice,
              context);
}

}  // namespace ringdp
