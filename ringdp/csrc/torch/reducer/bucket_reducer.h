// How a full bucket becomes an averaged one: an all-reduce, the codes of its method, or a communication hook.
// Owned by the Reducer, called under its lock.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "engine/work.h"
#include "torch/reducer_bucket.h"

namespace ringdp {

class CodeExchange;
class DeviceGuard;

enum class BuiltinHook { kAllReduce, kFp16Compress };

class BucketExchange {
 public:
  static constexpr const char* kHookAndMethods =
      "a communication hook and compression both say how buckets are reduced: use one of them (compressors can be "
      "communication hooks too)";

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
  int64_t divisor() const { return divisor_; }
  // Gradients are that much larger than residuals (the loss scale): a power of two.
  void set_factor(float factor) { factor_ = factor; }
  // Look for infinities and NaNs, where that takes no pass over memory.
  void set_watching(bool watching) { watching_ = watching; }

  // How codes travel: by ring's own compressed all-reduce, or by torch/code_exchange.h, over whatever the group has there.
  void set_exchanging_codes(bool exchanging) { exchanging_codes_ = exchanging; }
  bool exchanges_codes() const { return exchanging_codes_; }
  // Whether a codec's bucket can be sent from memory there, in that way.
  bool has_codecs(c10::Device device, bool exchanging) const;
  // Whether the bucket's method is in use, and reduces by codes.
  static const NativeMethod* native(const Bucket& bucket);
  // The hook that reduces the bucket: its method's, where that is in use, or the user's. Null: none.
  c10d::CommHookInterface* hook_of(const Bucket& bucket) const;

  // Starts the bucket's operation, named after the bucket. A codec's: what bucket.sections says.
  void launch(Bucket& bucket, std::size_t bucket_count, const std::vector<at::Tensor>& parameters);
  // Until bucket.gradients holds the result (device tensors: until the current stream may use it). Throws what failed.
  void wait(Bucket& bucket);

  // Where another backend than ring reduces buckets beside it (torch/guard.h), all ranks announce each bucket, and nobody
  // waits for that in the step: this is called when a backward has ended, and returns when the others have announced
  // what this rank had before the last `kLag` backwards. Throws what failed.
  static constexpr int64_t kLag = 2;
  void follow_announcements(int64_t step);
  // Throws why ring's group failed, where there is such a guard.
  void throw_if_failed(c10::DeviceType device);

  // The mean over all ranks, by a plain all-reduce in place: `buffer` is dense and contiguous. Waits for it.
  void average(at::Tensor buffer);

  // What launch does to a bucket, for a rank that has run out of input: `zeros` stands for the bucket's buffer, and
  // `sections` lie in it.
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
  c10::intrusive_ptr<c10d::Work> exchange_codes(Bucket& bucket, at::Tensor buffer, const Compression& compression);
  void keep_order(const at::Tensor& buffer);
  std::shared_ptr<FiniteReport> report_for(const at::Tensor& buffer) const;
  DeviceGuard* guard(c10::DeviceType device);
  void announce(const Bucket& bucket, const at::Tensor& buffer, c10d::ReduceOp::RedOpType op);
  bool averages(const at::Tensor& buffer) const { return average_ && divisor_ == 0 && !buffer.is_sparse(); }

  struct Announced {
    int64_t step;
    DeviceGuard* guard;  // in guards_
    std::shared_ptr<ringdp::Work> work;
  };

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool average_;
  int64_t divisor_ = 0;
  float factor_ = 1.0f;
  bool watching_ = false;
  bool exchanging_codes_ = false;
  std::shared_ptr<CodeExchange> last_codes_;  // shared with its callbacks
  std::unique_ptr<c10d::CommHookInterface> hook_;
  std::map<c10::DeviceType, std::shared_ptr<DeviceGuard>>
      guards_;  // asked for so far; shared with the ring; may be null
  std::deque<Announced> announced_;
};

}  // namespace ringdp
