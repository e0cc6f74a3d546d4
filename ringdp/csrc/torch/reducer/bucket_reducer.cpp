#include "torch/reducer/bucket_reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_real.h>

#include <exception>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/naming.h"
#include "codec/plugin.h"
#include "engine/callback_gate.h"
#include "torch/backend/future_wait.h"
#include "torch/backend/process_group.h"
#include "torch/backend/watchdog.h"
#include "torch/reducer/c10d_compressed_all_reduce.h"

namespace ringdp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kHookGrace{500};

// `begin`: when the end of backward began to wait. A bucket whose future has not noted its end counts as done when the wait
// ends.
void note_end(BucketTimes& times, Clock::time_point begin, const c10d::Work* work) {
  const auto now = Clock::now();
  const auto* ring_work = dynamic_cast<const RingWork*>(work);
  Clock::time_point done = ring_work != nullptr ? ring_work->marked_at() : times.done->load();
  if (done == Clock::time_point()) done = now;
  times.seconds = seconds(done - times.launched);
  times.exposed_s = seconds(now - begin);
}

void check_result(const at::Tensor& result, const Bucket& bucket) {
  if (!result.defined())
    throw Error(ErrorKind::kValue, "the communication hook completed its future with None, not with the bucket's mean");
  if (!bucket.sparse && result.numel() != bucket.gradients.numel())
    throw Error(ErrorKind::kValue, "the communication hook completed its future with " +
                                       std::to_string(result.numel()) + " elements for a bucket of " +
                                       std::to_string(bucket.gradients.numel()));
}

// ring's own works look at them while they wait; gloo's would wait to their end.
void look_at_signals_until_done(c10d::Work& work) {
  if (dynamic_cast<RingWork*>(&work) != nullptr) return;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work.getFuture();
  } catch (const c10::Error&) {  // not every backend's works have one
    return;
  }
  if (future) wait_until_complete(*future, std::chrono::milliseconds(0));
}

at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

c10d::AllreduceOptions with_op(c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return options;
}

// torch's ALLREDUCE and FP16_COMPRESS, whose classes its library does not export.
class Builtin final : public c10d::CommHookInterface {
 public:
  Builtin(c10::intrusive_ptr<c10d::ProcessGroup> group, BuiltinHook which) : group_(std::move(group)), which_(which) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
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

void BucketReducer::set_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  TORCH_CHECK(hook_ == nullptr, "register_comm_hook or register_builtin_comm_hook can only be called once.");
  hook_ = std::move(hook);
}

void BucketReducer::set_builtin_hook(BuiltinHook which) {
  set_hook(std::make_unique<Builtin>(group_.process_group(), which));
}

void BucketReducer::group_replaced() {
  announced_.clear();
  watchdogs_.clear();
}

c10d::GradBucket BucketReducer::describe(const Bucket& bucket, at::Tensor buffer, std::size_t bucket_count,
                                         const std::vector<at::Tensor>& parameters) const {
  std::vector<c10::IntArrayRef> shapes;
  std::vector<at::Tensor> members;
  shapes.reserve(bucket.members.size());
  members.reserve(bucket.members.size());
  for (std::size_t member : bucket.members) {
    shapes.push_back(parameters[member].sizes());
    members.push_back(parameters[member]);
  }
  return c10d::GradBucket(bucket.index, bucket_count, std::move(buffer), bucket.memory.offsets, bucket.memory.lengths,
                          std::move(shapes), std::move(members), std::nullopt);
}

bool BucketReducer::has_codecs(c10::Device device, bool exchanging) const {
  if (exchanging) return device_codec(device.type()) != nullptr;
  return device.is_cpu() && group_.ring(device.type()) != nullptr;
}

const CodecReduction* BucketReducer::native(const Bucket& bucket) {
  const auto* native = dynamic_cast<const CodecReduction*>(bucket.reduction);
  return native != nullptr && native->enabled() ? native : nullptr;
}

c10d::CommHookInterface* BucketReducer::hook_of(const Bucket& bucket) const {
  if (bucket.reduction == nullptr) return hook_.get();
  auto* reduction = dynamic_cast<HookReduction*>(bucket.reduction);
  return reduction != nullptr && reduction->enabled() ? &reduction->hook() : nullptr;
}

std::shared_ptr<FiniteReport> BucketReducer::report_for(const at::Tensor& buffer) const {
  const bool floating = buffer.is_floating_point() || buffer.is_complex();
  if (!watching_ || buffer.is_sparse() || !floating || !group_.ring(buffer.device().type())) return nullptr;
  return std::make_shared<FiniteReport>();
}

BackendWatchdog* BucketReducer::watchdog(c10::DeviceType device) {
  auto found = watchdogs_.find(device);
  if (found == watchdogs_.end()) found = watchdogs_.emplace(device, watchdog_of(*group_.process_group(), device)).first;
  return found->second.get();
}

// Announces the bucket as the operation that reduces it. A hook's bucket is announced as a sum, whatever the hook issues.
void BucketReducer::announce(const Bucket& bucket, const at::Tensor& buffer, c10d::ReduceOp::RedOpType op) {
  BackendWatchdog* watchdog = this->watchdog(buffer.device().type());
  if (watchdog == nullptr) return;
  Announcement what;
  what.dtype = element_type(buffer.scalar_type(), "all_reduce");
  what.op = reduce_op_of(op, "all_reduce");
  what.count = static_cast<uint64_t>(buffer.numel());
  for (const CompressedSection& section : bucket.sections)
    what.layout_hash = hash_mix(hash_mix(what.layout_hash, section.count), section.owner_offset);
  if (const CodecReduction* reduction = native(bucket))
    what.layout_hash = hash_mix(hash_mix(what.layout_hash, codec_identity(reduction->codec())),
                                static_cast<uint64_t>(group_.ranks_with_input()));
  announced_.push_back({bucket.sent_in, watchdog, watchdog->announce(what)});
}

void BucketReducer::follow_announcements(int64_t step) {
  while (!announced_.empty()) {
    const Announced& first = announced_.front();
    if (!first.work->finished() && first.step > step - kLag) return;
    const Announced oldest = first;
    announced_.pop_front();
    oldest.watchdog->wait(*oldest.work);
  }
}

void BucketReducer::throw_if_failed(c10::DeviceType device) {
  if (const BackendWatchdog* watchdog = this->watchdog(device)) watchdog->throw_if_failed();
}

c10::intrusive_ptr<c10d::Work> BucketReducer::mean(at::Tensor buffer, const std::shared_ptr<FiniteReport>& report) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool average = group_.averages(buffer);
  if (!average) {
    const int64_t divisor = group_.ranks_with_input();
    // Before the sum, as torch's DDP does it, and for the same bits.
    if (divisor != 1) buffer.mul_(1.0 / static_cast<double>(divisor));
  }
  return all_reduce(buffer, average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM, report);
}

c10::intrusive_ptr<c10d::Work> BucketReducer::all_reduce(const at::Tensor& buffer, c10d::ReduceOp::RedOpType op,
                                                         const std::shared_ptr<FiniteReport>& report) {
  std::vector<at::Tensor> tensors{as_real(buffer)};
  if (report) return group_.ring(buffer.device().type())->all_reduce_watched(tensors[0], op, report);
  return group_.process_group()->allreduce(tensors, with_op(op));
}

c10::intrusive_ptr<c10d::Work> BucketReducer::all_reduce_compressed(Bucket& bucket, at::Tensor buffer, CodecId codec) {
  bucket.report = exchanging_codes_ && !buffer.is_cpu() ? nullptr : std::make_shared<FiniteReport>();
  Compression compression;
  compression.codec = codec;
  compression.loss_scale = loss_scale_;
  compression.divisor = static_cast<std::size_t>(group_.ranks_with_input());
  if (exchanging_codes_) return all_reduce_over_c10d(bucket, std::move(buffer), compression);
  ProcessGroupRing* ring = group_.ring(buffer.device().type());
  return ring->all_reduce_compressed(std::move(buffer), bucket.sections, compression, bucket.report, bucket.residuals);
}

c10::intrusive_ptr<c10d::Work> BucketReducer::all_reduce_over_c10d(Bucket& bucket, at::Tensor buffer,
                                                                   const Compression& compression) {
  C10dCompressedAllReduce::Call call;
  call.group = group_.process_group();
  call.buffer = std::move(buffer);
  for (std::size_t i = 0; i < bucket.sections.size(); ++i) {
    const CompressedSection& section = bucket.sections[i];
    call.sections.push_back({section.x, section.count, section.owner_offset, {}});
    if (i < bucket.feedback.size()) call.sections.back().feedback = bucket.feedback[i];
  }
  call.compression = compression;
  call.kept = bucket.residuals;
  call.non_finite = bucket.non_finite;
  call.report = bucket.report;
  last_codes_ = C10dCompressedAllReduce::begin(std::move(call));
  return last_codes_->work();
}

// The last bucket's operations are issued before this one: backends that match operations by their order need the same order
// on all ranks, and callbacks would issue theirs at different moments.
void BucketReducer::keep_order(const at::Tensor& buffer) {
  const auto before = std::exchange(last_codes_, nullptr);
  if (before && group_.ring(buffer.device().type()) == nullptr) before->wait_until_issued();
}

void BucketReducer::launch(Bucket& bucket, std::size_t bucket_count, const std::vector<at::Tensor>& parameters) {
  if (!bucket.sparse) wait_for_streams(bucket);
  bucket.report = nullptr;
  if (group_.ranks() == 1 && !has_hook()) return;
  keep_order(bucket.buffer);
  const NamedScope scope(bucket.name);
  bucket.times = {Clock::now(), std::make_shared<std::atomic<Clock::time_point>>()};
  bucket.hook = hook_of(bucket);
  const bool summed = bucket.hook != nullptr || (native(bucket) == nullptr && !group_.averages(bucket.buffer));
  announce(bucket, bucket.buffer, summed ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG);
  if (bucket.hook != nullptr) {
    at::Tensor buffer = bucket.sparse ? bucket.buffer : bucket.gradients;
    c10d::GradBucket described = describe(bucket, std::move(buffer), bucket_count, parameters);
    const CallbackGate gate;  // until the hook has attached what follows
    bucket.future = bucket.hook->runHook(described);
    bucket.future->addCallback([done = bucket.times.done](c10::ivalue::Future&) { *done = Clock::now(); });
  } else if (const CodecReduction* reduction = native(bucket)) {
    bucket.work = all_reduce_compressed(bucket, bucket.buffer, reduction->codec());
  } else {
    bucket.report = report_for(bucket.buffer);
    bucket.work = mean(bucket.buffer, bucket.report);
  }
}

void BucketReducer::wait(Bucket& bucket) {
  const auto begin = Clock::now();
  auto work = std::exchange(bucket.work, nullptr);
  auto future = std::exchange(bucket.future, nullptr);
  if (!work && !future) return;
  BackendWatchdog* const watchdog = this->watchdog(bucket.buffer.device().type());
  if (future) wait_for_future(bucket, *future, watchdog);
  if (work && bucket.buffer.is_cpu()) look_at_signals_until_done(*work);
  if (watchdog != nullptr) {
    try {
      const auto what = work ? work->getFuture() : future;
      watchdog->wait_for(*what);
      if (what->hasError()) std::rethrow_exception(what->exception_ptr());
    } catch (...) {
      watchdog->throw_first_cause();
      throw;
    }
    watchdog->throw_if_failed();
  }
  if (work) work->wait();
  if (future) future->wait();
  note_end(bucket.times, begin, work.get());
  if (!future) return;
  if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor result = bucket.hook->parseHookResult(future->value());
  check_result(result, bucket);
  if (bucket.sparse) {
    bucket.buffer = result;
  } else if (result.data_ptr() != bucket.gradients.data_ptr() ||
             result.scalar_type() != bucket.gradients.scalar_type()) {
    bucket.gradients.copy_(result.reshape(bucket.gradients.sizes()));
  }
}

// The operations of the hook time out first, because their errors name the ranks that are missing.
void BucketReducer::wait_for_future(const Bucket& bucket, c10::ivalue::Future& future,
                                    const BackendWatchdog* watchdog) const {
  const std::chrono::milliseconds limit = timeout_of(*group_.process_group(), bucket.buffer.device().type());
  const auto look = [&] {
    if (watchdog != nullptr) watchdog->throw_if_failed();
  };
  if (!wait_until_complete(future, limit.count() > 0 ? limit + kHookGrace : limit, look))
    throw_late_hook(bucket, limit);
}

void BucketReducer::throw_late_hook(const Bucket& bucket, std::chrono::milliseconds limit) const {
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

void BucketReducer::average(at::Tensor buffer) {
  group_.set_divisor(0);
  mean(std::move(buffer), nullptr)->wait();
}

c10::intrusive_ptr<c10::ivalue::Future> BucketReducer::shadow(Bucket& bucket, c10d::GradBucket& zeros) {
  keep_order(zeros.getBuffer());
  auto* const hook = hook_of(bucket);
  const bool summed = hook != nullptr || (native(bucket) == nullptr && !group_.averages(zeros.getBuffer()));
  announce(bucket, zeros.getBuffer(), summed ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG);
  if (hook != nullptr) {
    const CallbackGate gate;
    return hook->runHook(zeros);
  }
  if (const CodecReduction* reduction = native(bucket)) {
    return all_reduce_compressed(bucket, zeros.getBuffer(), reduction->codec())->getFuture();
  }
  bucket.report = report_for(zeros.getBuffer());
  return all_reduce(zeros.getBuffer(), c10d::ReduceOp::SUM, bucket.report)->getFuture();
}

c10::intrusive_ptr<c10::ivalue::Future> BucketReducer::sum(const c10d::GradBucket& bucket) {
  return all_reduce(bucket.getBuffer(), c10d::ReduceOp::SUM, nullptr)->getFuture();
}

}  // namespace ringdp
