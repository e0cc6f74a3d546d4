#include "mesh/send_window.h"

#include <algorithm>

#include "mesh/early_frames.h"

namespace ringdp {
namespace {

constexpr std::size_t kLeastEagerBytes = 64;  // less is not worth a frame, and may be less than operations can cut

}  // namespace

// Bytes beyond the grant are eager: within the flow's first ones and the peer's window. A larger flow never ends
// before its last grant has come, so no grant arrives too late.
std::size_t SendWindow::allowance(const SendFlow& flow) const {
  if (flow.sent < flow.granted) return flow.granted - flow.sent;
  if (flow.requested) return 0;
  uint64_t eager_end = std::min(flow.total, flow.eager);
  if (flow.sent >= eager_end) return 0;
  std::size_t window = kEagerWindowBytes - static_cast<uint32_t>(eager_sent_ - eager_credited_);
  std::size_t rest = eager_end - flow.sent;
  if (window < rest && window < kLeastEagerBytes) return 0;
  return std::min(rest, window);
}

bool SendWindow::sendable(const SendFlow& flow) const {
  if (flow.total == 0) return !flow.opened;
  return flow.ready > flow.sent && allowance(flow) > 0;
}

SendFlow* SendWindow::next_of(const std::deque<SendFlow*>& flows) const {
  SendFlow* bulk = nullptr;
  for (SendFlow* flow : flows) {
    if (!sendable(*flow)) continue;
    if (!flow->identity->bulk) return flow;
    if (bulk == nullptr) bulk = flow;
  }
  return bulk;
}

bool SendWindow::must_request(const SendFlow& flow) const {
  bool small = flow.total > 0 && flow.total <= kSmallFlowBytes;
  return small && !flow.requested && flow.granted == 0 && flow.ready > flow.sent && allowance(flow) == 0;
}

bool SendWindow::keep_grant(const FrameHeader& header) {
  if (early_grants_.size() >= kMaxEarlyOperations) return false;
  uint64_t& kept = early_grants_[{header.group, header.sequence}];
  kept = std::max(kept, header.offset);
  return true;
}

void SendWindow::take_grant(SendFlow& flow) {
  auto grant = early_grants_.find({flow.identity->group, flow.identity->sequence});
  if (grant == early_grants_.end()) return;
  flow.granted = std::min(grant->second, flow.total);
  early_grants_.erase(grant);
}

void SendWindow::discard_group(uint64_t group) {
  std::erase_if(early_grants_, [&](const auto& entry) { return entry.first.first == group; });
}

}  // namespace ringdp
