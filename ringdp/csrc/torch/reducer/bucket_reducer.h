// BucketReducer: reduces one full bucket to its mean over the ranks: `launch` chooses the strategy and starts the
// operation, `wait` ends it. It keeps the order of the group's operations, and announces each bucket where another
// backend reduces it. Owned by the Reducer, called under its lock (but `wait` and `follow_announcements`, which are
// called without it) by the threads that run backward, without the GIL.
//
// A bucket's ranges in torch.profiler: one during its operation ("ringdp move …"), one while the end of backward waits
// for it ("ringdp wait …"). Their names have the bucket, the algorithm and the peers. Without a profiler they cost a
// check of a flag. Called by the BucketReducer, on its threads.
//
// BucketAnnouncer: if another backend (NCCL) reduces the buckets, each rank announces every bucket over ring
// (torch/backend/watchdog.h), without blocking the step. So a disagreement is an error, and a lost or late rank is
// named. It does nothing if ring itself reduces the buckets. Owned by the BucketReducer; announces under the Reducer's
// lock; follow and watchdog are called at the end of backward, without it. Without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "engine/group_state.h"
#include "torch/reducer/bucket.h"
#include "torch/reducer/gradient_compression.h"
#include "torch/reducer/overflow_report.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/reduction_strategy.h"

namespace ringdp {

class BackendWatchdog;

class BucketAnnouncer {
 public:
  explicit BucketAnnouncer(ReducerGroup& group) : group_(group) {}

  // Announces the operation by which `strategy` reduces `buffer`, under the current name.
  void announce(const Bucket& bucket, const at::Tensor& buffer, const ReductionStrategy& strategy);
  // Called when a backward has ended. Waits until the other ranks have announced the buckets that this one announced
  // before the last `kLag` backwards. Throws the error of an announcement.
  static constexpr int64_t kLag = 2;
  void follow(int64_t step);
  // Throws the failure of ring's group, if there is a watchdog.
  void throw_if_failed(c10::DeviceType device);
  BackendWatchdog* watchdog(c10::DeviceType device);  // may be null
  void group_replaced();

 private:
  struct Announced {
    int64_t step;
    BackendWatchdog* watchdog;  // in watchdogs_
    std::shared_ptr<ringdp::Work> work;
  };

  ReducerGroup& group_;
  std::map<c10::DeviceType, std::shared_ptr<BackendWatchdog>>
      watchdogs_;  // made so far; shared with the ring; may be null
  std::deque<Announced> announced_;
};

// "bucket 3: fc.weight (ring, 4 MiB, ranks 1 and 3)", of a bucket that this rank of the group reduces.
std::string describe_for_profiler(const Bucket& bucket, const ReducerGroup& group);

// From now until `bucket.operation` has ended. Does nothing without a profiler, or if the operation does not report
// its end.
void profile_moving(const Bucket& bucket, const ReducerGroup& group);

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
