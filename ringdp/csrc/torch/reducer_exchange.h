// How a full bucket becomes an averaged one: an all-reduce, or the communication hook that the user registered.
// Owned by the Reducer, called under its lock.
#pragma once

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "torch/reducer_bucket.h"

namespace ringdp {

enum class BuiltinHook { kAllReduce, kFp16Compress };

class BucketExchange {
 public:
  // `average`: the backend has ReduceOp::AVG; otherwise gradients are multiplied by 1/ranks before they are summed.
  BucketExchange(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average);

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  int ranks() const { return group_->getSize(); }
  bool has_hook() const { return hook_ != nullptr; }

  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook);  // throws where there is one
  void set_builtin_hook(BuiltinHook which);
  void set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average);
  // Ranks that still have input (join); 0: all of them, by the backend's average where it has one.
  void set_divisor(int64_t divisor) { divisor_ = divisor; }

  // Starts the bucket's operation, named after the bucket.
  void launch(Bucket& bucket, std::size_t bucket_count, const std::vector<at::Tensor>& parameters);
  // Until bucket.gradients holds the result (device tensors: until the current stream may use it). Throws what failed.
  void wait(Bucket& bucket);

  // The mean over all ranks, by a plain all-reduce in place: `buffer` is dense and contiguous. Waits for it.
  void average(at::Tensor buffer);

  // What launch does to a bucket whose rank has run out of input: `bucket` holds zeros.
  c10::intrusive_ptr<c10::ivalue::Future> shadow(c10d::GradBucket& bucket);
  // The plain sum, for hooks that divide themselves.
  c10::intrusive_ptr<c10::ivalue::Future> sum(const c10d::GradBucket& bucket);

  c10d::GradBucket describe(const Bucket& bucket, at::Tensor buffer, std::size_t bucket_count,
                            const std::vector<at::Tensor>& parameters) const;

 private:
  c10::intrusive_ptr<c10d::Work> all_reduce(at::Tensor buffer);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool average_;
  int64_t divisor_ = 0;
  std::unique_ptr<c10d::CommHookInterface> hook_;
};

}  // namespace ringdp
