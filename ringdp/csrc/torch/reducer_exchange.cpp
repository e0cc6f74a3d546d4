#include "torch/reducer_exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_real.h>

#include <exception>
#include <utility>

#include "base/naming.h"
#include "engine/hold.h"

namespace ringdp {
namespace {

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

c10::intrusive_ptr<c10d::Work> BucketExchange::all_reduce(at::Tensor buffer) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool average = average_ && divisor_ == 0 && !buffer.is_sparse();
  if (!average) {
    const int64_t divisor = divisor_ == 0 ? ranks() : divisor_;
    // Before the sum, as torch's DDP does it, and for the same bits.
    if (divisor != 1) buffer.mul_(1.0 / static_cast<double>(divisor));
  }
  std::vector<at::Tensor> tensors{as_real(buffer)};
  return group_->allreduce(tensors, with_op(average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM));
}

void BucketExchange::launch(Bucket& bucket, std::size_t bucket_count, const std::vector<at::Tensor>& parameters) {
  if (!bucket.sparse) wait_for_streams(bucket);
  if (ranks() == 1 && !has_hook()) return;
  const NamedScope scope(bucket.name);
  if (has_hook()) {
    at::Tensor buffer = bucket.sparse ? bucket.buffer : bucket.gradients;
    c10d::GradBucket described = describe(bucket, std::move(buffer), bucket_count, parameters);
    const CallbackHold hold;  // until the hook has attached what follows
    bucket.future = hook_->runHook(described);
  } else {
    bucket.work = all_reduce(bucket.buffer);
  }
}

void BucketExchange::wait(Bucket& bucket) {
  if (auto work = std::exchange(bucket.work, nullptr)) work->wait();
  auto future = std::exchange(bucket.future, nullptr);
  if (!future) return;
  future->wait();
  if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor result = hook_->parseHookResult(future->value());
  if (bucket.sparse) {
    bucket.buffer = result;
  } else if (result.data_ptr() != bucket.gradients.data_ptr() ||
             result.scalar_type() != bucket.gradients.scalar_type()) {
    bucket.gradients.copy_(result.reshape(bucket.gradients.sizes()));
  }
}

void BucketExchange::average(at::Tensor buffer) {
  set_divisor(0);
  all_reduce(std::move(buffer))->wait();
}

c10::intrusive_ptr<c10::ivalue::Future> BucketExchange::shadow(c10d::GradBucket& bucket) {
  const CallbackHold hold;
  return has_hook() ? hook_->runHook(bucket) : sum(bucket);
}

c10::intrusive_ptr<c10::ivalue::Future> BucketExchange::sum(const c10d::GradBucket& bucket) {
  std::vector<at::Tensor> tensors{as_real(bucket.getBuffer())};
  return group_->allreduce(tensors, with_op(c10d::ReduceOp::SUM))->getFuture();
}

}  // namespace ringdp
