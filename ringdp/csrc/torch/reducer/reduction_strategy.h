// ReductionStrategy: one way to reduce a bucket to its mean over the ranks.
//   ExactStrategy     an all-reduce
//   ResidualStrategy the same, after residuals of codes were added to the gradients (AutoReduction, Bucket::too_small)
//   CodecStrategy     ring's compressed all-reduce, or C10dCompressedAllReduce
//   HookStrategy      a communication hook: the user's, or a reduction's
// Owned by the BucketReducer. `wait` and `finish` are called without the Reducer's lock, the others under it; by the
// threads that run backward, without the GIL.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "torch/reducer/bucket.h"
#include "torch/reducer/gradient_compression.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/step_results.h"

namespace ringdp {

class BackendWatchdog;
class C10dCompressedAllReduce;

using FuturePointer = c10::intrusive_ptr<c10::ivalue::Future>;

class ReductionStrategy {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~ReductionStrategy() = default;

  // Called before the bucket is announced. `buffer` is the bucket's, or replaces it (`shadowing`: zeros of a rank
  // without input).
  virtual void prepare(Bucket& /*bucket*/, const at::Tensor& /*buffer*/, bool /*shadowing*/) {}
  // Whether `launch` multiplies by bucket.factors while it reduces; the same on all ranks. Otherwise the gradients are
  // multiplied before `prepare`.
  virtual bool multiplies(const Bucket& /*bucket*/) const { return false; }
  // For the announcement, besides name and type.
  virtual c10d::ReduceOp::RedOpType operation(const at::Tensor& buffer) const = 0;
  virtual uint64_t layout_hash(const Bucket& /*bucket*/) const { return 0; }

  // Starts the bucket's operation, under the current name. `bucket_count`: the number of buckets of this backward.
  virtual void launch(Bucket& bucket, std::size_t bucket_count) = 0;
  // Waits until the operation has ended (device tensors: until the current stream may use its result); throws its
  // error. Returns the time of its end, or nullopt if unknown.
  virtual Clock::time_point wait(Bucket& bucket, BucketOperation& operation, BackendWatchdog* watchdog);
  // Stores the result in bucket.gradients.
  virtual void finish(Bucket& /*bucket*/, BucketOperation& /*operation*/) {}
  // As launch, for a rank that has run out of input.
  virtual FuturePointer shadow(Bucket& bucket, c10d::GradBucket& zeros) = 0;
  // Waits until callbacks of its last bucket have issued their operations: backends that match operations by their
  // order need the same order on all ranks. `next`: the buffer of the next bucket.
  virtual void wait_until_issued(const at::Tensor& /*next*/) {}
};

class ExactStrategy : public ReductionStrategy {
 public:
  ExactStrategy(ReducerGroup& group, const OverflowReport& overflow) : group_(group), overflow_(overflow) {}

  bool multiplies(const Bucket& bucket) const override;
  c10d::ReduceOp::RedOpType operation(const at::Tensor& buffer) const override;
  void launch(Bucket& bucket, std::size_t bucket_count) override;
  FuturePointer shadow(Bucket& bucket, c10d::GradBucket& zeros) override;

  // The mean over all ranks in place: `buffer` is dense and contiguous. Waits for it.
  void average(const at::Tensor& buffer);
  // The plain sum, for hooks that divide it themselves.
  FuturePointer sum(const c10d::GradBucket& bucket);

 private:
  c10::intrusive_ptr<c10d::Work> mean(at::Tensor buffer, const std::shared_ptr<FiniteReport>& report,
                                      std::vector<double> factors = {});
  c10::intrusive_ptr<c10d::Work> all_reduce(const at::Tensor& buffer, c10d::ReduceOp::RedOpType op,
                                            const std::shared_ptr<FiniteReport>& report,
                                            std::vector<double> factors = {});
  std::shared_ptr<FiniteReport> report_for(const at::Tensor& buffer) const;

  ReducerGroup& group_;
  const OverflowReport& overflow_;
};

class ResidualStrategy final : public ExactStrategy {
 public:
  ResidualStrategy(ReducerGroup& group, const OverflowReport& overflow, GradientCompression& compression)
      : ExactStrategy(group, overflow), compression_(compression) {}

  bool multiplies(const Bucket& /*bucket*/) const override { return false; }
  void prepare(Bucket& bucket, const at::Tensor& buffer, bool shadowing) override;

 private:
  GradientCompression& compression_;
};

class CodecStrategy final : public ReductionStrategy {
 public:
  CodecStrategy(ReducerGroup& group, OverflowReport& overflow, GradientCompression& compression)
      : group_(group), overflow_(overflow), compression_(compression) {}

  void prepare(Bucket& bucket, const at::Tensor& buffer, bool shadowing) override;
  c10d::ReduceOp::RedOpType operation(const at::Tensor& buffer) const override;
  uint64_t layout_hash(const Bucket& bucket) const override;
  void launch(Bucket& bucket, std::size_t bucket_count) override;
  FuturePointer shadow(Bucket& bucket, c10d::GradBucket& zeros) override;
  void wait_until_issued(const at::Tensor& next) override;

 private:
  c10::intrusive_ptr<c10d::Work> all_reduce(Bucket& bucket, at::Tensor buffer);
  c10::intrusive_ptr<c10d::Work> all_reduce_over_c10d(Bucket& bucket, at::Tensor buffer,
                                                      const Compression& compression);

  ReducerGroup& group_;
  OverflowReport& overflow_;
  GradientCompression& compression_;
  std::shared_ptr<C10dCompressedAllReduce> last_;  // shared with its callbacks
};

enum class BuiltinHook { kAllReduce, kFp16Compress };

// torch's ALLREDUCE and FP16_COMPRESS, whose classes its library does not export.
std::unique_ptr<c10d::CommHookInterface> make_builtin_hook(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                           BuiltinHook which);

class HookStrategy final : public ReductionStrategy {
 public:
  HookStrategy(ReducerGroup& group, const TrainableParameters& parameters) : group_(group), parameters_(parameters) {}

  // Sets the user's hook, for all buckets; throws if there is one.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  bool has_hook() const { return hook_ != nullptr; }
  // The hook of this bucket: its reduction's, if that is enabled, or the user's. Null: none.
  c10d::CommHookInterface* hook_of(const Bucket& bucket) const;
  c10d::GradBucket describe(const Bucket& bucket, at::Tensor buffer, std::size_t bucket_count) const;

  // a sum for the announcement; the hook may issue others
  c10d::ReduceOp::RedOpType operation(const at::Tensor& buffer) const override;
  void launch(Bucket& bucket, std::size_t bucket_count) override;
  // Throws also if the hook does not complete its future within the group's timeout.
  Clock::time_point wait(Bucket& bucket, BucketOperation& operation, BackendWatchdog* watchdog) override;
  void finish(Bucket& bucket, BucketOperation& operation) override;
  FuturePointer shadow(Bucket& bucket, c10d::GradBucket& zeros) override;

 private:
  [[noreturn]] void throw_late_hook(const Bucket& bucket, std::chrono::milliseconds limit) const;

  ReducerGroup& group_;
  const TrainableParameters& parameters_;
  std::unique_ptr<c10d::CommHookInterface> hook_;
};

}  // namespace ringdp
