// Exchange: what a step sends besides its own state, and what comes of it: the group, the weights of the batches, the
// reduction of a bucket with its compression, whether something was not finite, and the first failure. Invariant: all
// of it outlives the steps; the ranks have made the same calls on it. Owned by the Reducer, used under its lock.
//
// StepFailure: the first failure after which the ranks no longer agree. After it no step begins. Called by the threads
// that run backward, with or without the reducer's lock, because waits for buckets run without it; it takes that lock
// itself to keep a failure.
//
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
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "engine/elastic_group.h"
#include "engine/group_table.h"
#include "torch/reducer/bucket.h"
#include "torch/reducer/forwards.h"
#include "torch/reducer/gradient_compression.h"
#include "torch/reducer/gradient_weights.h"
#include "torch/reducer/plan.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/reduction_strategy.h"
#include "torch/reducer/step_results.h"

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

class StepFailure {
 public:
  // `step`: the number of the present or last one.
  StepFailure(std::recursive_mutex& mutex, const int64_t& step) : mutex_(mutex), step_(step) {}

  // Runs `action`, and keeps the text of its exception. After Error(kMembership) the program may continue.
  template <class Action>
  auto keeping(Action&& action) {
    try {
      return std::forward<Action>(action)();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kMembership) keep(current_error_text());
      throw;
    } catch (...) {
      keep(current_error_text());
      throw;
    }
  }
  // The same for an operation of this step; its exception gets the operation's name. `bucket` is -1 if it is not a
  // bucket's.
  template <class Action>
  void keeping_in(int64_t bucket, const std::string& name, Action&& action) {
    std::exception_ptr loss;
    keeping([&] {
      in_bucket(bucket, name, step_, [&] {
        try {
          std::forward<Action>(action)();
        } catch (const Error& error) {
          if (!lost_ || !is_loss(error)) throw;
          loss = std::current_exception();
        } catch (...) {  // a hook's version of the same failure
          if (!lost_ || !lost_()) throw;
          loss = std::make_exception_ptr(Error(ErrorKind::kPeerLost, current_error_text()));
        }
      });
    });
    if (loss) std::rethrow_exception(loss);
  }
  // The loss of a member is not a failure: the step is repeated (StepRepair). `lost`: whether the present members have
  // lost one.
  void let_losses_pass(std::function<bool()> lost) { lost_ = std::move(lost); }

  // The text of that exception; empty: there was none. Under the lock.
  const std::string& text() const { return text_; }
  void forget() { text_.clear(); }
  void throw_if_any() const;

 private:
  void keep(std::string text) {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = std::move(text);
  }

  std::recursive_mutex& mutex_;
  const int64_t& step_;
  std::string text_;
  std::function<bool()> lost_;  // empty: each loss is a failure
};

class Exchange {
 public:
  Exchange(ReducerGroup& group, Plan& plan, std::recursive_mutex& mutex);

  ReducerGroup& group;
  GradientWeights weights;
  GradientCompression compression;
  OverflowReport overflow;
  BucketReducer buckets;
  Forwards forwards;
  UsedHistory used;
  int64_t step = 0;  // the number of the present or last one: counts the backwards that synchronise
  StepFailure failure;

  // With one rank: nothing is sent, and gradients stay in autograd's memory.
  bool local() const;
  // Whether hooks may issue operations after the last bucket was launched.
  bool calls_back() const { return buckets.has_hook() || plan_.reductions.calls_back(); }
  // Throws the failure of ring's group if another backend reduces the buckets.
  void throw_if_group_failed();
  // Asks rank 0 for the order of the gradients, if the plan has not learned it yet; else, or before there are any, an
  // empty one.
  std::vector<int32_t> ask_for_order(const std::vector<std::size_t>& arrivals, const std::vector<bool>& used_somewhere);

 private:
  const Plan& plan_;
};

}  // namespace ringdp
