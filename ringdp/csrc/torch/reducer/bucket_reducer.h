// BucketReducer: reduces one full bucket to its mean over the ranks: `launch` chooses the strategy and starts the
// operation, `wait` ends it. It keeps the order of the group's operations, and announces each bucket where another
// backend reduces it. Owned by the Reducer, called under its lock (but `wait` and `follow_announcements`, which are
// called without it) by the threads that run backward, without the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "torch/reducer/bucket.h"
#include "torch/reducer/bucket_announcer.h"
#include "torch/reducer/gradient_compression.h"
#include "torch/reducer/overflow_report.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/reduction_strategy.h"

namespace ringdp {

class BucketReducer {
 public:
  BucketReducer(ReducerGroup& group, const TrainableParameters& parameters, GradientCompression& compression,
                OverflowReport& overflow)
      : group_(group),
        compression_(compression),
        exact_(group, overflow),
        residual_(group, overflow, compression),
        codec_(group, overflow, compression),
        hook_(group, parameters),
        announcer_(group) {}

  // The user's communication hook.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook) { hook_.set_hook(std::move(hook)); }
  bool has_hook() const { return hook_.has_hook(); }
  void group_replaced() { announcer_.group_replaced(); }

  // Whether `launch` does not change the bucket's buffer if the mean has memory of its own.
  bool leaves_input(const Bucket& bucket, bool weighted);
  // Starts the bucket's operation, named after the bucket; `note` ends the name.
  void launch(Bucket& bucket, int64_t step, std::size_t bucket_count, const std::string& note);
  // Waits until bucket.gradients holds the result (device tensors: until the current stream may use it). Throws the
  // error of the operation.
  void wait(Bucket& bucket);

  // See BucketAnnouncer.
  void follow_announcements(int64_t step) { announcer_.follow(step); }
  void throw_if_failed(c10::DeviceType device) { announcer_.throw_if_failed(device); }

  // The mean over all ranks, by a plain all-reduce in place: `buffer` is dense and contiguous. Waits for it.
  void average(const at::Tensor& buffer) { exact_.average(buffer); }

  // For a rank that has run out of input (join): fills the bucket with zeros, and starts its operation.
  bool hooked(const Bucket& bucket) const { return hook_.hook_of(bucket) != nullptr; }
  c10d::GradBucket describe(const Bucket& bucket, at::Tensor zeros, std::size_t bucket_count) const {
    return hook_.describe(bucket, std::move(zeros), bucket_count);
  }
  FuturePointer shadow(Bucket& bucket, c10d::GradBucket& zeros, int64_t step);
  FuturePointer sum(const c10d::GradBucket& bucket) { return exact_.sum(bucket); }

 private:
  ReductionStrategy& strategy_of(const Bucket& bucket);
  void multiply(Bucket& bucket, const ReductionStrategy& strategy) const;
  ReductionStrategy& begin(Bucket& bucket, const at::Tensor& buffer, int64_t step, bool shadowing);

  const ReducerGroup& group_;
  const GradientCompression& compression_;
  ExactStrategy exact_;
  ResidualStrategy residual_;
  CodecStrategy codec_;
  HookStrategy hook_;
  BucketAnnouncer announcer_;
  ReductionStrategy* last_ = nullptr;  // that launched the last bucket
};

}  // namespace ringdp
