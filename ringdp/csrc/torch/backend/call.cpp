#include "torch/backend/call.h"

#include "torch/backend/call_site.h"

namespace ringdp {

Call::Call(std::shared_ptr<GroupHandle> group, DeviceSide& devices, c10::intrusive_ptr<RingWork> work,
           const CallTiming& timing)
    : group_(std::move(group)),
      devices_(devices),
      synchronous_(!timing.async_op),
      timeout_ms_(timing.timeout > kNoTimeout ? timing.timeout.count() : 0),
      call_site_(python_call_site()),
      work_(std::move(work)) {}

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
  const bool nothing = operations_.empty();
  if (const auto elastic = UnitScope::active() ? nullptr : group_->elastic(); elastic && !nothing) {
    elastic->called(operations_, !c10d::isP2POp(work_->retrieveOpType()));
    work_->belong_to(elastic);
  }
  work_->set_operations(group_->engine(), std::move(operations_));
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
