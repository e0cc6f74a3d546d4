// torch's handles of what is in flight: RingWork of one call's operations, StagedWork of several stages of them.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "engine/elastic_group.h"
#include "engine/group.h"
#include "torch/backend/hooks.h"

namespace ringdp {

// The devices of the tensors that are not on the CPU; each once.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors);

// RingWork: torch's handle of an operation in flight. With tensors on devices the operation is over when the last copy
// back is queued; `wait` orders the current streams after that. Owned by Python and, for asynchronous operations, by
// the completion thread, which marks its future. Any thread, with or without the GIL.
class RingWork final : public c10d::Work {
 public:
  RingWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs);

  // `works`: the operations in order; the last one's end is the end of all (operations of a group end in order).
  void set_operations(std::shared_ptr<Engine> engine, std::vector<std::shared_ptr<ringdp::Work>> works);
  // The future's value is a list of these lists instead of the list of outputs. Called before the work is handed out.
  void set_output_lists(std::vector<std::vector<at::Tensor>> lists) { output_lists_ = std::move(lists); }
  // The copies of its operations on tensors of devices. Called before the work is handed out.
  void add_staging(std::shared_ptr<Staging> staging) { stagings_.push_back(std::move(staging)); }
  // The hooks to call after its success. Called before the work is handed out.
  void report_to(std::shared_ptr<Hooks> hooks) { hooks_ = std::move(hooks); }
  // The work does not belong to a unit of that group: after the loss of a member it fails with MembershipChanged.
  // Called before the work is handed out.
  void belong_to(std::weak_ptr<ElasticGroup> elastic) { elastic_ = std::move(elastic); }
  // Called once when the last operation is over, on the completion thread, or by the thread of a synchronous call.
  void mark(std::exception_ptr error);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // The same on all ranks for the same operation: see CallbackScope. 0 without an operation.
  uint64_t callback_path() const;
  // When the completion thread saw its end; the epoch before.
  std::chrono::steady_clock::time_point marked_at() const { return marked_at_; }
  int lane() const { return works_.empty() ? 0 : works_.back()->lane(); }
  // The number of callbacks attached to the future before.
  uint64_t attach_callback() { return attached_.fetch_add(1); }
  uint64_t getSequencenumber() const override;
  int sourceRank() const override;  // of a message received

  // The total time for which threads of this process have waited for operations.
  static int64_t waited_ns() { return all_waited_ns_.load(std::memory_order_relaxed); }

 private:
  static inline std::atomic<int64_t> all_waited_ns_{0};

  c10::IValue value() const { return output_lists_.empty() ? c10::IValue(outputs_) : c10::IValue(output_lists_); }
  // when the results are complete, for its streams
  void complete(const c10::intrusive_ptr<c10::ivalue::Future>& future);

  std::vector<at::Tensor> outputs_;
  std::vector<std::vector<at::Tensor>> output_lists_;
  std::shared_ptr<Hooks> hooks_;    // shared with the process group
  std::shared_ptr<Engine> engine_;  // shared with the Runtime: a work may outlive its process group
  std::vector<std::shared_ptr<ringdp::Work>> works_;
  std::weak_ptr<ElasticGroup> elastic_;  // the process group's; null: not elastic, or the work belongs to a unit
  std::vector<std::shared_ptr<Staging>> stagings_;  // shared with the operations

  // A caller that sees the work complete may stop the profiler, which frees this event.
  void end_event();
  // After `wait` the future is complete too, as with torch's own backends; unless waiting for it would block.
  void complete_future();

  std::mutex future_mutex_;
  std::condition_variable marked_changed_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made at the first call of getFuture
  bool marked_ = false;
  std::atomic<std::chrono::steady_clock::time_point> marked_at_{};
  bool waited_ = false;
  std::atomic<uint64_t> attached_{0};
  std::exception_ptr error_;
};

// StagedWork: the Work of a call that takes several operations, the later of which depend on the results of the
// earlier ones. Owned by its caller and by the callbacks between its stages, which run on the completion threads. Any
// thread.
class StagedWork final : public c10d::Work {
 public:
  // `engine` may be null. The future is for the streams that are current when the work ends.
  StagedWork(std::shared_ptr<Engine> engine, int rank, c10d::OpType type, const char* title,
             std::vector<at::Tensor> outputs, std::shared_ptr<Hooks> hooks = nullptr);

  // Runs `stage`; an exception ends the work.
  void attempt(const std::function<void()>& stage);
  void end(std::exception_ptr error);

  // Polls Python's signals while it waits, like Engine::wait; throws the work's error.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<Engine> engine_;  // shared with the Runtime; may be null
  std::shared_ptr<Hooks> hooks_;    // of the process group, called after its success; may be null
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // of the streams that are current where `end` is called
};

}  // namespace ringdp
