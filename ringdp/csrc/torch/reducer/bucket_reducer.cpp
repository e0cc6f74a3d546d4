#include "torch/reducer_exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_real.h>

#include <exception>
#include <utility>

#include "base/bytes.h"
#include "base/naming.h"
#include "codec/plugin.h"
#include "engine/hold.h"
#include "torch/code_exchange.h"
#include "torch/guard.h"
#include "torch/ring_of.h"

namespace ringdp {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// `begin`: when the end of backward began to wait. What nobody was told about ends when that wait does.
void note_end(BucketTimes& times, Clock::time_point begin, const c10d::Work* work) {
  const auto now = Clock::now();
  const auto* ring_work = dynamic_cast<const RingWork*>(work);
  Clock::time_point done = ring_work != nullptr ? ring_work->marked_at() : times.done->load();
  if (done == Clock::time_point()) done = now;
  times.seconds = seconds(done - times.launched);
  times.exposed_s = seconds(now - begin);
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

BucketExchange::BucketExchange(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average)
    : group_(std::move(group)), average_(average) {}

void BucketExchange::set_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  TORCH_CHECK(hook_ == nullptr, "register_comm_hook or register_builtin_comm_hook can only be called once.");
  hook_ = std::move(hook);
}

void BucketExchange::set_builtin_hook(BuiltinHook which) { set_hook(std::make_unique<Builtin>(group_, which)); }

void BucketExchange::set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average) {
  group_ = std::move(group);
  average_ = average;
  announced_.clear();
  guards_.clear();
}

c10d::GradBucket BucketExchange::describe(const Bucket& bucket, at::Tensor buffer, std::size_t bucket_count,
                                          const std::vector<at::Tensor>& parameters) const {
  std::vector<c10::IntArrayRef> shapes;
  std::vector<at::Tensor> members;
  shapes.reserve(bucket.members.size());
  members.reserve(bucket.members.size());
  for (std::size_t member : bucket.members) {
    shapes.push_back(parameters[member].sizes());
    members.push_back(parameters[member]);
  }
  return c10d::GradBucket(bucket.index, bucket_count, std::move(buffer), bucket.plan.offsets, bucket.plan.lengths,
                          std::move(shapes), std::move(members), std::nullopt);
}

bool BucketExchange::has_codecs(c10::Device device, bool exchanging) const {
  if (exchanging) return device_codec(device.type()) != nullptr;
  return device.is_cpu() && ring_of(*group_, device.type()) != nullptr;
}

const NativeMethod* BucketExchange::native(const Bucket& bucket) {
  const auto* native = dynamic_cast<const NativeMethod*>(bucket.method);
  return native != nullptr && native->enabled() ? native : nullptr;
}

c10d::CommHookInterface* BucketExchange::hook_of(const Bucket& bucket) const {
  if (bucket.method == nullptr) return hook_.get();
  auto* method = dynamic_cast<HookMethod*>(bucket.method);
  return method != nullptr && method->enabled() ? &method->hook() : nullptr;
}

std::shared_ptr<FiniteReport> BucketExchange::report_for(const at::Tensor& buffer) const {
  const bool floating = buffer.is_floating_point() || buffer.is_complex();
  if (!watching_ || buffer.is_sparse() || !floating || !ring_of(*group_, buffer.device().type())) return nullptr;
  return std::make_shared<FiniteReport>();
}

DeviceGuard* BucketExchange::guard(c10::DeviceType device) {
  auto found = guards_.find(device);
  if (found == guards_.end()) found = guards_.emplace(device, guard_of(*group_, device)).first;
  return found->second.get();
}

// As what the bucket is to be reduced by. A hook's operations are its own: they are announced as the sum they stand for.
void BucketExchange::announce(const Bucket& bucket, const at::Tensor& buffer, c10d::ReduceOp::RedOpType op) {
  DeviceGuard* guard = this->guard(buffer.device().type());
  if (guard == nullptr) return;
  Announcement what;
  what.dtype = element_type(buffer.scalar_type(), "all_reduce");
  what.op = reduce_op_of(op, "all_reduce");
  what.count = static_cast<uint64_t>(buffer.numel());
  for (const CompressedSection& section : bucket.sections)
    what.layout_hash = hash_mix(hash_mix(what.layout_hash, section.count), section.turn);
  if (const NativeMethod* method = native(bucket))
    what.layout_hash = hash_mix(hash_mix(what.layout_hash, codec_identity(method->codec())),
                                static_cast<uint64_t>(divisor_ == 0 ? ranks() : divisor_));
  announced_.push_back({bucket.sent_in, guard, guard->announce(what)});
}

void BucketExchange::follow_announcements(int64_t step) {
  while (!announced_.empty()) {
    const Announced& first = announced_.front();
    if (!first.work->finished() && first.step > step - kLag) return;
    const Announced oldest = first;
    announced_.pop_front();
    oldest.guard->wait(*oldest.work);
  }
}

void BucketExchange::throw_if_failed(c10::DeviceType device) {
  if (const DeviceGuard* guard = this->guard(device)) guard->throw_if_failed();
}

c10::intrusive_ptr<c10d::Work> BucketExchange::mean(at::Tensor buffer, const std::shared_ptr<FiniteReport>& report) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool average = averages(buffer);
  if (!average) {
    const int64_t divisor = divisor_ == 0 ? ranks() : divisor_;
    // Before the sum, as torch's DDP does it, and for the same bits.
    if (divisor != 1) buffer.mul_(1.0 / static_cast<double>(divisor));
  }
  return all_reduce(buffer, average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM, report);
}

c10::intrusive_ptr<c10d::Work> BucketExchange::all_reduce(const at::Tensor& buffer, c10d::ReduceOp::RedOpType op,
                                                          const std::shared_ptr<FiniteReport>& report) {
  std::vector<at::Tensor> tensors{as_real(buffer)};
  if (report) return ring_of(*group_, buffer.device().type())->all_reduce_watched(tensors[0], op, report);
  return group_->allreduce(tensors, with_op(op));
}

c10::intrusive_ptr<c10d::Work> BucketExchange::all_reduce_compressed(Bucket& bucket, at::Tensor buffer, CodecId codec) {
  bucket.report = exchanging_codes_ && !buffer.is_cpu() ? nullptr : std::make_shared<FiniteReport>();
  Compression compression;
  compression.codec = codec;
  compression.factor = factor_;
  compression.divisor = static_cast<std::size_t>(divisor_ == 0 ? ranks() : divisor_);
  if (exchanging_codes_) return exchange_codes(bucket, std::move(buffer), compression);
  ProcessGroupRing* ring = ring_of(*group_, buffer.device().type());
  return ring->all_reduce_compressed(std::move(buffer), bucket.sections, compression, bucket.report, bucket.residuals);
}

c10::intrusive_ptr<c10d::Work> BucketExchange::exchange_codes(Bucket& bucket, at::Tensor buffer,
                                                              const Compression& compression) {
  CodeExchange::Call call;
  call.group = group_;
  call.buffer = std::move(buffer);
  for (std::size_t i = 0; i < bucket.sections.size(); ++i) {
    const CompressedSection& section = bucket.sections[i];
    call.sections.push_back({section.x, section.count, section.turn, {}});
    if (i < bucket.feedback.size()) call.sections.back().feedback = bucket.feedback[i];
  }
  call.compression = compression;
  call.kept = bucket.residuals;
  call.non_finite = bucket.non_finite;
  call.report = bucket.report;
  last_codes_ = CodeExchange::begin(std::move(call));
  return last_codes_->work();
}

// What callbacks issue must not come at another place among this rank's operations than among the others'.
void BucketExchange::keep_order(const at::Tensor& buffer) {
  const auto before = std::exchange(last_codes_, nullptr);
  if (before && ring_of(*group_, buffer.device().type()) == nullptr) before->wait_until_issued();
}

void BucketExchange::launch(Bucket& bucket, std::size_t bucket_count, const std::vector<at::Tensor>& parameters) {
  if (!bucket.sparse) wait_for_streams(bucket);
  bucket.report = nullptr;
  if (ranks() == 1 && !has_hook()) return;
  keep_order(bucket.buffer);
  const NamedScope scope(bucket.name);
  bucket.times = {Clock::now(), std::make_shared<std::atomic<Clock::time_point>>()};
  bucket.hook = hook_of(bucket);
  const bool summed = bucket.hook != nullptr || (native(bucket) == nullptr && !averages(bucket.buffer));
  announce(bucket, bucket.buffer, summed ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG);
  if (bucket.hook != nullptr) {
    at::Tensor buffer = bucket.sparse ? bucket.buffer : bucket.gradients;
    c10d::GradBucket described = describe(bucket, std::move(buffer), bucket_count, parameters);
    const CallbackHold hold;  // until the hook has attached what follows
    bucket.future = bucket.hook->runHook(described);
    bucket.future->addCallback([done = bucket.times.done](c10::ivalue::Future&) { *done = Clock::now(); });
  } else if (const NativeMethod* method = native(bucket)) {
    bucket.work = all_reduce_compressed(bucket, bucket.buffer, method->codec());
  } else {
    bucket.report = report_for(bucket.buffer);
    bucket.work = mean(bucket.buffer, bucket.report);
  }
}

void BucketExchange::wait(Bucket& bucket) {
  const auto begin = Clock::now();
  auto work = std::exchange(bucket.work, nullptr);
  auto future = std::exchange(bucket.future, nullptr);
  if (!work && !future) return;
  if (DeviceGuard* guard = this->guard(bucket.buffer.device().type())) {
    try {
      const auto what = work ? work->getFuture() : future;
      guard->wait_for(*what);
      if (what->hasError()) std::rethrow_exception(what->exception_ptr());
    } catch (...) {
      guard->throw_first_cause();
      throw;
    }
    guard->throw_if_failed();
  }
  if (work) work->wait();
  if (future) future->wait();
  note_end(bucket.times, begin, work.get());
  if (!future) return;
  if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor result = bucket.hook->parseHookResult(future->value());
  if (bucket.sparse) {
    bucket.buffer = result;
  } else if (result.data_ptr() != bucket.gradients.data_ptr() ||
             result.scalar_type() != bucket.gradients.scalar_type()) {
    bucket.gradients.copy_(result.reshape(bucket.gradients.sizes()));
  }
}

void BucketExchange::average(at::Tensor buffer) {
  set_divisor(0);
  mean(std::move(buffer), nullptr)->wait();
}

c10::intrusive_ptr<c10::ivalue::Future> BucketExchange::shadow(Bucket& bucket, c10d::GradBucket& zeros) {
  keep_order(zeros.getBuffer());
  auto* const hook = hook_of(bucket);
  const bool summed = hook != nullptr || (native(bucket) == nullptr && !averages(zeros.getBuffer()));
  announce(bucket, zeros.getBuffer(), summed ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG);
  if (hook != nullptr) {
    const CallbackHold hold;
    return hook->runHook(zeros);
  }
  if (const NativeMethod* method = native(bucket)) {
    return all_reduce_compressed(bucket, zeros.getBuffer(), method->codec())->getFuture();
  }
  bucket.report = report_for(zeros.getBuffer());
  return all_reduce(zeros.getBuffer(), c10d::ReduceOp::SUM, bucket.report)->getFuture();
}

c10::intrusive_ptr<c10::ivalue::Future> BucketExchange::sum(const c10d::GradBucket& bucket) {
  return all_reduce(bucket.getBuffer(), c10d::ReduceOp::SUM, nullptr)->getFuture();
}

}  // namespace ringdp
