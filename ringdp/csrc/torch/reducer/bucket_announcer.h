// BucketAnnouncer: if another backend (NCCL) reduces the buckets, each rank announces every bucket over ring
// (torch/backend/watchdog.h), without blocking the step. So a disagreement is an error, and a lost or late rank is
// named. It does nothing if ring itself reduces the buckets. Owned by the BucketReducer; announces under the Reducer's
// lock; follow and watchdog are called at the end of backward, without it. Without the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>

#include "engine/work.h"
#include "torch/reducer/bucket.h"
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

}  // namespace ringdp
