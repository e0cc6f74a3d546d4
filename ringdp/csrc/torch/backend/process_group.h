// ProcessGroupRing: the backend "ring" of torch.distributed. Converts tensors and options, calls a GroupHandle, wraps
// its Work; nothing else. Owned by torch's ProcessGroup. Any thread; the order of calls must be the same on all ranks.
// Called without the GIL.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "engine/elastic_group.h"
#include "engine/group.h"
#include "torch/backend/backward_unit.h"
#include "torch/backend/buffers.h"
#include "torch/backend/hooks.h"
#include "torch/backend/reconfigurer.h"
#include "torch/backend/work.h"

namespace ringdp {

class BackendWatchdog;
class Call;
struct CallTiming;

class ProcessGroupRing final : public c10d::Backend {
 public:
  // `owns_runtime`: this group made the Runtime, and ends it in its shutdown.
  ProcessGroupRing(std::shared_ptr<GroupHandle> group, std::shared_ptr<Runtime> runtime, bool owns_runtime);
  // A group whose members may change after a loss.
  ProcessGroupRing(std::shared_ptr<ElasticGroup> elastic, std::shared_ptr<Runtime> runtime, bool owns_runtime);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // A group without members before its first `reconfigure`. `rank`, `size`: its values until then. `installed`: called
  // with each new Runtime, on the thread of the attempt.
  ProcessGroupRing(int rank, int size, std::chrono::milliseconds timeout, Reconfigurer::Settings settings,
                   std::function<void(const std::shared_ptr<Runtime>&)> installed);
#endif
  ~ProcessGroupRing() override;

  const std::string getBackendName() const override { return "ring"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& opts) override;
  // The present members. Throws Error(kState) before its first reconfigure, or during one.
  std::shared_ptr<GroupHandle> group() const;
  const std::shared_ptr<ElasticGroup>& elastic() const { return elastic_; }              // null: not an elastic group
  const std::shared_ptr<BackwardUnit>& backward_unit() const { return backward_unit_; }  // null if `elastic` is
  int rank() const { return elastic_ ? elastic_->rank() : getRank(); }
  int size() const { return elastic_ ? elastic_->size() : getSize(); }

  // The watchdog of a backend that moves this group's device tensors; made at the first call. See
  // torch/backend/watchdog.h.
  std::shared_ptr<BackendWatchdog> watchdog(const c10::intrusive_ptr<c10d::Backend>& foreign);

  // An operation for which its caller waits only in the next step. `shutdown` waits for it, so that a rank that ends
  // first does not fail it for the others.
  void finish_before_shutdown(const c10::intrusive_ptr<c10d::Work>& work);

  // Besides torch's calls, for the reducer and for communication hooks. `report` is filled in when the Work is done.
  // `buffer`: dense, contiguous, of a floating type; in place. FiniteReport::own is an address in it. `report` may be
  // null. `factors`: of each rank's input, the same on all ranks; only for float32 and float64 on the CPU, otherwise
  // empty. `input`: on the CPU, as `buffer`; read instead of the buffer and not changed; undefined: the buffer is the
  // input.
  c10::intrusive_ptr<c10d::Work> all_reduce_watched(at::Tensor buffer, c10d::ReduceOp op,
                                                    std::shared_ptr<FiniteReport> report,
                                                    std::vector<double> factors = {}, at::Tensor input = {});
  // `sections` are in `buffer` (float32, on the CPU); `residuals` are the tensors into which they point, kept alive.
  c10::intrusive_ptr<c10d::Work> all_reduce_compressed(at::Tensor buffer, std::vector<CompressedSection> sections,
                                                       const Compression& compression,
                                                       std::shared_ptr<FiniteReport> report,
                                                       std::vector<at::Tensor> residuals);
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
  // Torch's since 2.14: as gather, with one tensor on the root in place of a list. On other ranks `output` is ignored.
  virtual c10::intrusive_ptr<c10d::Work> gather_single(at::Tensor& output, at::Tensor& input,
                                                       const c10d::GatherOptions& opts);
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_rows,
                                               std::vector<int64_t>& input_rows,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_ms_.load()); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_.load(); }
  void shutdown() override;
  void abort() override;
  c10d::ErrorType getError() override;  // of the group's failure; SUCCESS if this rank itself has aborted it

  // Torch's since 2.14 (abort hooks) and 2.15 (completion hooks); see torch/backend/hooks.h.
  virtual bool supportsAbortHooks() const { return true; }
  virtual void registerAbortHook(int64_t id, Hooks::AbortHook hook) { hooks_->add_abort_hook(id, std::move(hook)); }
  virtual void unregisterAbortHook(int64_t id) { hooks_->remove_abort_hook(id); }
  virtual bool supportsCompletionHooks() const { return true; }
  virtual void registerCompletionHook(int64_t id, Hooks::CompletionHook hook) {
    hooks_->add_completion_hook(id, std::move(hook));
  }
  virtual void unregisterCompletionHook(int64_t id) { hooks_->remove_completion_hook(id); }

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return reconfigurer_ != nullptr; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& options) override;
#endif

 private:
  void close();
  std::shared_ptr<const FailureListener> listener_of_other_failures();
  Membership membership() const;
  std::shared_ptr<GroupHandle> counted();  // the group, for one more call
  // `title`: in the profiler.
  Call begin_call(c10d::OpType type, const char* title, const CallTiming& timing, const std::vector<at::Tensor>& inputs,
                  std::vector<at::Tensor> outputs);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  Membership install(Membership made);  // returns the old one
  Reconfigurer& reconfigurer() const;
#endif
  c10::intrusive_ptr<c10d::Work> receive(std::vector<at::Tensor>& tensors, int source, int tag, c10d::OpType type,
                                         const char* title);

  const std::shared_ptr<DeviceSide> devices_ = std::make_shared<DeviceSide>();  // shared with calls of several stages
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();              // shared with its works
  const bool owns_runtime_;
  const std::shared_ptr<ElasticGroup> elastic_;        // shared with the views' calls
  const std::shared_ptr<BackwardUnit> backward_unit_;  // shared with the reducers
  std::atomic<int64_t> timeout_ms_;
  mutable std::mutex membership_mutex_;
  Membership membership_;             // shared with calls, and its Runtime by all groups made from the default group
  std::atomic<bool> aborted_{false};  // by this rank, since the last `install`
  std::mutex watchdogs_mutex_;
  std::vector<std::shared_ptr<BackendWatchdog>> watchdogs_;  // shared with the reducers that use them
  std::mutex unfinished_mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> unfinished_;
  std::atomic<uint64_t> calls_{0};
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  std::function<void(const std::shared_ptr<Runtime>&)> installed_;
  std::unique_ptr<Reconfigurer> reconfigurer_;  // null: it does not reconfigure
#endif
};

// The backend "ring" of a process group, for calls beyond torch's interface. Null if the group uses another backend
// for that kind of device. Lives as long as the group.
ProcessGroupRing* ring_of(c10d::ProcessGroup& group, c10::DeviceType device);

}  // namespace ringdp
