#include "link/send_window.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "link/incoming_flows.h"
#include "transport/channel.h"

namespace ringdp {

namespace {

constexpr int64_t kLongPathUs = 5000;          // bulk is not paced over shorter ones
constexpr double kFirstBytesPerS = 5'000'000;  // 40 Mbit/s
constexpr int64_t kJitterUs = 2500;            // of paths, and of busy hosts: no queue
constexpr double kLeastBytesPerS = 1'250'000;  // 10 Mbit/s: no slower rate is chosen
constexpr double kStarts = 1.2;                // factor per round trip, until packets are queued for the first time
constexpr double kFaster = 0.03;               // growth per round trip from then on: at most this, and ...
constexpr int64_t kQueueStepUs = 1000;         // ... at most what makes packets wait so much longer; ...
constexpr int kPatience = 12;                  // ... after so many steps without a queue ...
constexpr double kDoubles = 4;                 // ... it doubles with every so many further ones, ...
constexpr double kFastest = 0.1;               // ... up to this, and ...
constexpr int64_t kMostStepUs = 5000;          // ... this
constexpr double kSlower = 0.9;                // factor on what arrives, once packets are queued
constexpr double kUsed = 0.6;                  // of the rate: a sender that uses less does not probe a higher one
constexpr double kLeastShare = 0.5;  // of the best rate: the queue may be of others' packets, or hosts are busy
constexpr auto kLateness = std::chrono::milliseconds(10);
constexpr auto kShortPathsEvery = std::chrono::seconds(1);
constexpr auto kLongestPause = std::chrono::milliseconds(500);  // a sample over a longer pause is discarded

constexpr double kFrameS = 0.002;
constexpr std::size_t kLeastFrameBytes = 4 * 1024;
constexpr std::size_t kMostFrameBytes = 64 * 1024;

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

BulkRate::BulkRate() : bytes_per_s_(kFirstBytesPerS) {}

bool BulkRate::admits(const NetworkPath* path) {
  waits_ = false;
  if (path == nullptr) return true;
  const auto now = Clock::now();
  if (wants_look(now))
    if (const auto it = path->carried()) look({it->bytes, it->round_trip_us, it->least_round_trip_us}, now);
  waits_ = !may_send(now);
  return !waits_;
}

void BulkRate::look(const Sample& sample, Clock::time_point now) {
  paced_ = sample.least_round_trip_us >= kLongPathUs;
  if (!paced_) {
    next_look_ = now + kShortPathsEvery;
    return;
  }
  const auto round_trip = std::chrono::microseconds(std::max(sample.round_trip_us, int64_t{1000}));
  next_look_ = now + round_trip;
  const auto since = now - std::exchange(looked_at_, now);
  const auto carried = static_cast<double>(sample.carried_bytes - std::exchange(carried_, sample.carried_bytes));
  const auto sent = static_cast<double>(std::exchange(sent_, 0));
  if (since > std::max<Clock::duration>(kLongestPause, 4 * round_trip) || since <= Clock::duration{}) return;
  const double arrived = carried / seconds(since);
  best_bytes_per_s_ = std::max(best_bytes_per_s_, arrived);
  const int64_t queue_us = sample.round_trip_us - sample.least_round_trip_us - kJitterUs;
  if (queue_us > (starting_ ? kLittleQueueUs : kMostQueueUs)) {
    starting_ = false;
    steps_ = 0;
    const double least = std::max(kLeastBytesPerS, kLeastShare * best_bytes_per_s_);
    bytes_per_s_ = std::max(least, kSlower * std::min(bytes_per_s_, arrived));
    next_look_ += round_trip;  // the new rate shows after one more round trip
  } else if (queue_us < kLittleQueueUs && sent > kUsed * bytes_per_s_ * seconds(since)) {
    const auto round_trip_us = static_cast<double>(sample.least_round_trip_us);
    const double step = std::min(kFaster, static_cast<double>(kQueueStepUs) / round_trip_us);
    const double most = std::min(kFastest, static_cast<double>(kMostStepUs) / round_trip_us);
    const double faster = step * std::exp2(std::max(0, ++steps_ - kPatience) / kDoubles);
    bytes_per_s_ *= starting_ ? kStarts : 1 + std::min(faster, most);
  }
}

std::size_t BulkRate::frame_bytes() const {
  if (!paced_) return kMostFrameBytes;
  return std::clamp(static_cast<std::size_t>(bytes_per_s_ * kFrameS), kLeastFrameBytes, kMostFrameBytes);
}

// A sender that is late may catch up, by at most kLateness.
void BulkRate::sent(std::size_t bytes, Clock::time_point now) {
  sent_ += bytes;
  free_at_ = std::max(free_at_, now - kLateness) +
             std::chrono::nanoseconds(static_cast<int64_t>(static_cast<double>(bytes) * 1e9 / bytes_per_s_));
}

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
