// Call: one call of torch's collective API. It collects the engine's operations of the call, then makes the Work, and
// waits if the call is synchronous. A local variable of the calling thread, without the GIL.
#pragma once

#include <memory>
#include <vector>

#include "engine/group.h"
#include "torch/backend/buffers.h"
#include "torch/backend/work.h"

namespace ringdp {

class Call {
 public:
  Call(GroupHandle& group, DeviceSide& devices, std::shared_ptr<Hooks> hooks, c10d::OpType type, const char* title,
       bool async_op, std::chrono::milliseconds timeout, const std::vector<at::Tensor>& inputs,
       std::vector<at::Tensor> outputs);

  // Options for the next operation; with `last` it is the call's last one.
  CallOptions options(std::shared_ptr<Buffers> buffers, bool last = true);
  // As in gloo: with several lists of outputs the future's value is the list of them.
  void set_output_lists(const std::vector<std::vector<at::Tensor>>& lists) { work_->set_output_lists(lists); }
  void add(std::shared_ptr<Work> operation) { operations_.push_back(std::move(operation)); }
  c10::intrusive_ptr<c10d::Work> done();

 private:
  GroupHandle& group_;
  DeviceSide& devices_;
  const bool synchronous_;
  const int64_t timeout_ms_;
  const int32_t call_site_;
  const bool in_order_;  // a collective, not a message
  c10::intrusive_ptr<RingWork> work_;
  std::vector<std::shared_ptr<Work>> operations_;
  std::vector<DeviceUse> uses_;  // of memory on devices, by these operations
};

}  // namespace ringdp
