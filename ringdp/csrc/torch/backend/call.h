// Call: one call of torch's collective API, made by ProcessGroupRing::begin_call. It collects the engine's operations
// of the call for its Work, and waits if the call is synchronous. A local variable of the calling thread, without the
// GIL.
#pragma once

#include <memory>
#include <vector>

#include "engine/group.h"
#include "torch/backend/buffers.h"
#include "torch/backend/work.h"

namespace ringdp {

// CallTiming: of a message or, from the options of any of torch's collectives, of that one. Value type.
struct CallTiming {
  bool async_op = true;
  std::chrono::milliseconds timeout = kNoTimeout;  // kNoTimeout or negative: the group's

  CallTiming() = default;
  template <typename Options>
  CallTiming(const Options& options) : async_op(options.asyncOp), timeout(options.timeout) {}
};

class Call {
 public:
  Call(std::shared_ptr<GroupHandle> group, DeviceSide& devices, c10::intrusive_ptr<RingWork> work,
       const CallTiming& timing);

  GroupHandle* operator->() const { return group_.get(); }  // issues its operations, with `options`
  // Options for the next operation; with `last` it is the call's last one.
  CallOptions options(std::shared_ptr<Buffers> buffers, bool last = true);
  // As in gloo: with several lists of outputs the future's value is the list of them.
  void set_output_lists(const std::vector<std::vector<at::Tensor>>& lists) { work_->set_output_lists(lists); }
  void add(std::shared_ptr<Work> operation) { operations_.push_back(std::move(operation)); }
  c10::intrusive_ptr<c10d::Work> done();
  c10::intrusive_ptr<c10d::Work> done(std::shared_ptr<Work> only) {
    add(std::move(only));
    return done();
  }

 private:
  const std::shared_ptr<GroupHandle> group_;  // shared with the process group, whose members may change
  DeviceSide& devices_;
  const bool synchronous_;
  const int64_t timeout_ms_;
  const int32_t call_site_;
  c10::intrusive_ptr<RingWork> work_;
  std::vector<std::shared_ptr<Work>> operations_;
  std::vector<DeviceUse> uses_;  // of memory on devices, by these operations
};

}  // namespace ringdp
