#include "torch/reducer/bucket_announcer.h"

#include "torch/backend/process_group.h"
#include "torch/backend/watchdog.h"

namespace ringdp {

BackendWatchdog* BucketAnnouncer::watchdog(c10::DeviceType device) {
  auto found = watchdogs_.find(device);
  if (found == watchdogs_.end()) found = watchdogs_.emplace(device, watchdog_of(*group_.process_group(), device)).first;
  return found->second.get();
}

void BucketAnnouncer::announce(const Bucket& bucket, const at::Tensor& buffer, const ReductionStrategy& strategy) {
  BackendWatchdog* watchdog = this->watchdog(buffer.device().type());
  if (watchdog == nullptr) return;
  Announcement what;
  what.dtype = element_type(buffer.scalar_type(), "all_reduce");
  what.op = reduce_op_of(strategy.operation(buffer), "all_reduce");
  what.count = static_cast<uint64_t>(buffer.numel());
  what.layout_hash = strategy.layout_hash(bucket);
  announced_.push_back({bucket.sent_in, watchdog, watchdog->announce(what)});
}

void BucketAnnouncer::follow(int64_t step) {
  while (!announced_.empty()) {
    const Announced& first = announced_.front();
    if (!first.work->finished() && first.step > step - kLag) return;
    const Announced oldest = first;
    announced_.pop_front();
    oldest.watchdog->wait(*oldest.work);
  }
}

void BucketAnnouncer::throw_if_failed(c10::DeviceType device) {
  if (const BackendWatchdog* watchdog = this->watchdog(device)) watchdog->throw_if_failed();
}

void BucketAnnouncer::group_replaced() {
  announced_.clear();
  watchdogs_.clear();
}

}  // namespace ringdp
