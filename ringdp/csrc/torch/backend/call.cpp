#include "torch/backend/call.h"

#include "torch/backend/call_site.h"

namespace ringdp {

Call::Call(GroupHandle& group, DeviceSide& devices, std::shared_ptr<Hooks> hooks, c10d::OpType type, const char* title,
           bool async_op, std::chrono::milliseconds timeout, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs)
    : group_(group),
      devices_(devices),
      synchronous_(!async_op),
      timeout_ms_(timeout > kNoTimeout ? timeout.count() : 0),
      call_site_(python_call_site()),
      in_order_(type != c10d::OpType::SEND && type != c10d::OpType::RECV && type != c10d::OpType::RECVANYSOURCE),
      work_(c10::make_intrusive<RingWork>(group.view().rank, type, title, inputs, std::move(outputs))) {
  work_->report_to(std::move(hooks));
}

CallOptions Call::options(std::shared_ptr<Buffers> buffers, bool last) {
  CallOptions out;
  out.timeout_ms = timeout_ms_;
  out.caller_waits = synchronous_;
  out.call_site = call_site_;
  if (buffers->copies()) {
    out.before = [buffers] { buffers->before(); };
    out.after = [buffers] { buffers->after(); };
  }
  if (const auto& staging = buffers->staging()) {
    out.staging = staging;
    work_->add_staging(staging);
    uses_.insert(uses_.end(), buffers->uses().begin(), buffers->uses().end());
  }
  out.keep_alive = std::move(buffers);
  if (last && !synchronous_) out.on_done = [work = work_](std::exception_ptr error) { work->mark(std::move(error)); };
  return out;
}

c10::intrusive_ptr<c10d::Work> Call::done() {
  bool nothing = operations_.empty();
  if (const auto elastic = UnitScope::active() ? nullptr : group_.elastic(); elastic && !nothing) {
    elastic->called(operations_, in_order_);
    work_->belong_to(elastic);
  }
  work_->set_operations(group_.engine(), std::move(operations_));
  for (const DeviceUse& use : uses_) devices_.remember(work_, use);
  if (nothing) {
    work_->mark(nullptr);
  } else if (synchronous_) {
    work_->wait(kNoTimeout);
    work_->mark(nullptr);
  }
  return work_;
}

}  // namespace ringdp
