// BucketReducer: reduces one full bucket to its mean over the ranks. `launch` chooses one of three ways: an exact all-reduce,
// a codec (ring's compressed all-reduce or C10dCompressedAllReduce), or a communication hook; `wait` ends any of them. It keeps
// the order of the group's operations, and announces each bucket to the BackendWatchdog where another backend reduces it.
// Owned by the Reducer, called under its lock by the threads that run backward, without the GIL.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "engine/work.h"
#include "torch/reducer/bucket.h"
#include "torch/reducer/reducer_group.h"

namespace ringdp {

class C10dCompressedAllReduce;
class BackendWatchdog;

enum class BuiltinHook { kAllReduce, kFp16Compress };

class BucketReducer {
 public:
  static constexpr const char* kHookAndCompression =
      "a communication hook and compression both say how buckets are reduced: use one of them (compressors can be "
      "communication hooks too)";

  explicit BucketReducer(ReducerGroup& group) : group_(group) {}

  bool has_hook() const { return hook_ != nullptr; }

  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook);  // throws where there is one
  void set_builtin_hook(BuiltinHook which);
  void group_replaced();
  // The loss scale, a power of two: gradients are that much larger than residuals.
  void set_loss_scale(float scale) { loss_scale_ = scale; }
  // Checks for infinities and NaNs where that takes no extra pass over memory.
  void set_watching(bool watching) { watching_ = watching; }

  // False: codes go by ring's compressed all-reduce. True: by torch/reducer/c10d_compressed_all_reduce.h, over any backend.
  void set_exchanging_codes(bool exchanging) { exchanging_codes_ = exchanging; }
  bool exchanges_codes() const { return exchanging_codes_; }
  // Whether a codec's bucket can be sent from memory there, in that way.
  bool has_codecs(c10::Device device, bool exchanging) const;
  // The bucket's codec, if it has one and it is enabled; else null.
  static const CodecReduction* native(const Bucket& bucket);
  // The hook that reduces the bucket: its reduction's, if that is enabled, or the user's. Null: none.
  c10d::CommHookInterface* hook_of(const Bucket& bucket) const;

  // Starts the bucket's operation, named after the bucket. A codec reduces bucket.sections.
  void launch(Bucket& bucket, std::size_t bucket_count, const std::vector<at::Tensor>& parameters);
  // Waits until bucket.gradients holds the result (device tensors: until the current stream may use it). Throws the error of
  // the operation; also if a hook does not complete its future within the group's timeout.
  void wait(Bucket& bucket);

  // When another backend (NCCL) reduces the buckets, each rank announces every bucket over ring (torch/backend/watchdog.h),
  // without blocking the step. This is called when a backward has ended, and waits until the other ranks have announced the
  // buckets that this one announced before the last `kLag` backwards. Throws the error of an announcement.
  static constexpr int64_t kLag = 2;
  void follow_announcements(int64_t step);
  // Throws the failure of ring's group, if there is such a watchdog.
  void throw_if_failed(c10::DeviceType device);

  // The mean over all ranks, by a plain all-reduce in place: `buffer` is dense and contiguous. Waits for it.
  void average(at::Tensor buffer);

  // As launch, for a rank that has run out of input: `zeros` takes the place of the bucket's buffer, and `sections` lie in
  // it.
  c10::intrusive_ptr<c10::ivalue::Future> shadow(Bucket& bucket, c10d::GradBucket& zeros);
  // The plain sum, for hooks that divide themselves.
  c10::intrusive_ptr<c10::ivalue::Future> sum(const c10d::GradBucket& bucket);

  c10d::GradBucket describe(const Bucket& bucket, at::Tensor buffer, std::size_t bucket_count,
                            const std::vector<at::Tensor>& parameters) const;

 private:
  c10::intrusive_ptr<c10d::Work> mean(at::Tensor buffer, const std::shared_ptr<FiniteReport>& report);
  c10::intrusive_ptr<c10d::Work> all_reduce(const at::Tensor& buffer, c10d::ReduceOp::RedOpType op,
                                            const std::shared_ptr<FiniteReport>& report);
  c10::intrusive_ptr<c10d::Work> all_reduce_compressed(Bucket& bucket, at::Tensor buffer, CodecId codec);
  c10::intrusive_ptr<c10d::Work> all_reduce_over_c10d(Bucket& bucket, at::Tensor buffer,
                                                      const Compression& compression);
  void keep_order(const at::Tensor& buffer);
  std::shared_ptr<FiniteReport> report_for(const at::Tensor& buffer) const;
  void wait_for_future(const Bucket& bucket, c10::ivalue::Future& future, const BackendWatchdog* watchdog) const;
  [[noreturn]] void throw_late_hook(const Bucket& bucket, std::chrono::milliseconds limit) const;
  BackendWatchdog* watchdog(c10::DeviceType device);
  void announce(const Bucket& bucket, const at::Tensor& buffer, c10d::ReduceOp::RedOpType op);

  struct Announced {
    int64_t step;
    BackendWatchdog* watchdog;  // in watchdogs_
    std::shared_ptr<ringdp::Work> work;
  };

  ReducerGroup& group_;
  float loss_scale_ = 1.0f;
  bool watching_ = false;
  bool exchanging_codes_ = false;
  std::shared_ptr<C10dCompressedAllReduce> last_codes_;  // shared with its callbacks
  std::unique_ptr<c10d::CommHookInterface> hook_;
  std::map<c10::DeviceType, std::shared_ptr<BackendWatchdog>>
      watchdogs_;  // asked for so far; shared with the ring; may be null
  std::deque<Announced> announced_;
};

}  // namespace ringdp
