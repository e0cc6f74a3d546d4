#include "link/link_sender.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
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

namespace {

constexpr std::size_t kSmallPayloadBytes = 16 * 1024;  // sent at once
constexpr std::size_t kSendBudgetBytes = 1024 * 1024;  // one call serves one peer no longer than this
constexpr std::size_t kMaxTalkBytes = 64 * 1024;       // pings and pongs queued for a peer that does not read
constexpr std::size_t kBulkUnsentBytes = 64 * 1024;
constexpr std::array<std::byte, DirectReader::kAlignment> kPadding{};
constexpr std::size_t kControlPieceBytes =
    400;  // of control frames alone, in one packet (the least MTU of IPv4 is 576)

std::size_t padding_on(const Connection& connection, std::size_t payload) {
  return connection.direct() != nullptr ? DirectReader::padding_of(payload) : 0;
}

}  // namespace

void LinkSender::opened(bool checksums) {
  check_ = FrameCheck(checksums && connection_.direct() == nullptr);
  if (heals_ && connection_.direct() == nullptr) kept_.emplace();
  unsent_is_limited_ = false;
  for (auto& [header, payload] : std::exchange(waiting_, {})) put(header, payload);
}

// Staged frames are kept: their operations count them as sent.
void LinkSender::interrupted() {
  wished_ = true;
  blocked_ = held_back_ = false;
  control_.clear();
  finish_frame();
}

bool LinkSender::resumed(uint64_t taken) {
  if (!kept_->rewind(taken)) return false;
  stream_sent_ = 0;
  received_ = false;
  unsent_is_limited_ = false;
  window_.bulk_rate() = BulkRate();
  control(FrameHeader::of(FrameType::kCredit, 0, 0));  // it shows the peer that this rank reads, as a goodbye does
  for (auto& [header, payload] : std::exchange(waiting_, {})) put(header, payload);
  return true;
}

void LinkSender::look_what_arrived() {
  // Otherwise the peer reports what it has received, or may close this channel before it has read from it. The goodbye
  // is the last frame: bytes that the peer has not read may be lost, and this rank has left by then.
  if (!connection_.connected() || connection_.healing() || !received_ || said_bye_) return;
  const uint64_t lost = connection_.path() != nullptr ? connection_.path()->undelivered() : 0;
  kept_->forget(stream_sent_ - std::min(stream_sent_, lost));
}

void LinkSender::attach(SendFlow& flow) {
  window_.take_grant(flow);
  sending_.push_back(&flow);
  wish();
}

// A frame that has begun is always finished, because the peer would otherwise take the next header for payload.
void LinkSender::detach(SendFlow& flow) {
  std::erase(sending_, &flow);
  if (kept_ && kept_->lends_any()) {
    look_what_arrived();
    kept_->take_over(flow, {});
  }
  if (payload_flow_ != &flow) return;
  // Half of the frame is sent: the other half comes from a copy.
  payload_flow_ = nullptr;
  orphan_.assign(payload_.begin(), payload_.end());
  payload_ = orphan_;
}

void LinkSender::will_change(const SendFlow& flow, std::span<const std::byte> memory) {
  if (!kept_ || !kept_->lends_any()) return;
  look_what_arrived();
  kept_->take_over(flow, memory);
}

void LinkSender::wish() {
  if (connection_.connected() || wished_ || !connection_.usable()) return;
  wished_ = true;
  events_.wanted();
}

bool LinkSender::has_outgoing() const {
  if (!connection_.connected() || connection_.departed() || connection_.healing()) return false;
  if (frame_under_way() || !control_.empty() || (kept_ && kept_->rewound())) return true;
  return !said_bye_ && std::any_of(sending_.begin(), sending_.end(), [this](SendFlow* flow) {
    return window_.sendable(*flow) || window_.must_request(*flow);
  });
}

void LinkSender::control(FrameHeader header, const std::string& payload) {
  if (said_bye_) return;
  if (connection_.connected() && !connection_.healing()) return put(header, payload);
  waiting_.emplace_back(header, payload);
  wish();
}

void LinkSender::put(FrameHeader header, const std::string& payload) {
  header.length = static_cast<uint32_t>(payload.size());
  header.credit = consumed_reported_ = consumed_;
  std::size_t at = control_.size();
  control_.resize(at + check_.head_bytes() + payload.size() + padding_on(connection_, payload.size()));
  check_.write_head(header, std::as_bytes(std::span(payload)), control_.data() + at);
  if (!payload.empty()) std::memcpy(control_.data() + at + check_.head_bytes(), payload.data(), payload.size());
  if (kept_)
    kept_->add(std::span(control_).subspan(at, check_.head_bytes()), std::as_bytes(std::span(payload)), nullptr);
}

void LinkSender::say_bye(const std::string& reason) {
  if (said_bye_) return;
  control(FrameHeader::of(FrameType::kBye, 0, 0), reason);
  said_bye_ = true;
}

// With a frame half sent this does not wait: a rank that leaves does not wait for long.
void LinkSender::answer_bye() {
  if (!connection_.connected() || connection_.direct() != nullptr || connection_.healing()) return;
  if (said_bye_ || frame_under_way() || (kept_ && kept_->rewound())) return;
  FrameHeader header = FrameHeader::of(FrameType::kCredit, 0, 0, kByeRead);
  header.credit = consumed_;
  std::array<std::byte, kFrameHeaderBytes + kFrameCheckBytes> head;
  check_.write_head(header, {}, head.data());
  const iovec piece{head.data(), check_.head_bytes()};
  connection_.channel().send(std::span(&piece, 1));
}

bool LinkSender::may_talk() const { return control_.size() < kMaxTalkBytes; }

bool LinkSender::grant(const FrameHeader& header) {
  for (SendFlow* flow : sending_) {
    if (flow->identity->group != header.group || flow->identity->sequence != header.sequence) continue;
    flow->granted = std::min(std::max(flow->granted, header.offset), flow->total);
    return true;
  }
  return false;
}

void LinkSender::consumed(uint32_t bytes) {
  consumed_ += bytes;
  if (static_cast<uint32_t>(consumed_ - consumed_reported_) >= kEagerWindowBytes / 2)
    control(FrameHeader::of(FrameType::kCredit, 0, 0));
}

bool LinkSender::stage_next() {
  head_.clear();
  head_sent_ = 0;
  payload_ = {};
  payload_sent_ = 0;
  padding_ = 0;
  payload_flow_ = nullptr;
  for (SendFlow* flow : sending_) {
    if (!window_.must_request(*flow)) continue;
    flow->requested = true;
    control(FrameHeader::of(FrameType::kRequest, flow->identity->group, flow->identity->sequence));
  }
  std::swap(head_, control_);
  if (said_bye_) return !head_.empty();
  SendFlow* const next = window_.next_of(sending_);
  const bool bulk = next != nullptr && next->identity->bulk && connection_.direct() == nullptr;
  if (!window_.bulk_rate().admits(bulk ? connection_.path() : nullptr) || next == nullptr) return !head_.empty();
  SendFlow& flow = *next;
  FrameHeader header;
  std::size_t limit = std::min<uint64_t>({segment_bytes_, window_.allowance(flow), flow.ready - flow.sent});
  if (bulk) {
    limit = std::min(limit, window_.bulk_rate().frame_bytes());
    if (NetworkPath* const path = connection_.path(); path != nullptr && !std::exchange(unsent_is_limited_, true))
      path->limit_unsent(kBulkUnsentBytes);
  }
  if (flow.total > 0) {
    const bool timed = flow.encodes && flow.record != nullptr;
    const Clock::time_point began = timed ? Clock::now() : Clock::time_point{};
    payload_ = flow.handler->outgoing(flow, flow.sent, limit);
    if (timed) flow.record->note_work(nanoseconds_of(began));
  }
  if (flow.total > 0 && payload_.empty()) return !head_.empty();  // less than one element is allowed: wait for more
  if (bulk) window_.bulk_rate().sent(payload_.size(), Clock::now());
  payload_flow_ = &flow;
  if (flow.record != nullptr && payload_.size() > kSmallPayloadBytes) flow.record->note_begin();
  padding_ = padding_on(connection_, payload_.size());
  header.eager = flow.sent >= flow.granted;
  if (header.eager) window_.sent_eagerly(payload_.size());
  header.length = static_cast<uint32_t>(payload_.size());
  header.group = flow.identity->group;
  header.sequence = flow.identity->sequence;
  header.offset = flow.sent;
  header.fingerprint = flow.identity->fingerprint;
  header.shape = flow.identity->shape;
  if (flow.identity->counts_differ) header.shape.count = flow.identity->elements(flow.total);
  header.credit = consumed_reported_ = consumed_;
  std::size_t at = head_.size();
  head_.resize(at + check_.head_bytes());
  check_.write_head(header, payload_, head_.data() + at);
  if (kept_)
    kept_->add(std::span(head_).subspan(at), payload_, payload_.size() > ResendQueue::kCopiedBytes ? &flow : nullptr);
  return true;
}

void LinkSender::finish_frame() {
  SendFlow* flow = std::exchange(payload_flow_, nullptr);
  std::size_t sent = payload_.size();
  payload_ = {};
  payload_sent_ = 0;
  padding_ = 0;
  head_.clear();
  head_sent_ = 0;
  orphan_.clear();
  const bool may_change = flow != nullptr && !flow->lasting;
  if (kept_ && (kept_->should_forget() || (may_change && kept_->lends_any()))) {
    look_what_arrived();
    if (may_change) kept_->take_over(*flow, {});
  }
  if (flow == nullptr) return;
  flow->sent += sent;
  flow->opened = true;
  if (flow->record != nullptr) flow->record->note(flow->sent);
  if (flow->complete()) std::erase(sending_, flow);
  // A sum may have waited for these bytes to leave.
  FlowRecord* const record = sent >= FlowRecord::kLeastWorkBytes ? flow->record : nullptr;
  flow->handler->flushed(*flow);
  if (record != nullptr) record->note_work(record->last_ns.load(std::memory_order_relaxed));
}

std::size_t LinkSender::pieces(std::array<iovec, 3>& out) const {
  std::size_t count = 0;
  // An abort or goodbye must pass also where large packets do not.
  const bool only_control = payload_.empty() && connection_.direct() == nullptr;
  const std::size_t most = only_control ? kControlPieceBytes : head_.size();
  if (head_sent_ < head_.size())
    out[count++] = {const_cast<std::byte*>(head_.data()) + head_sent_, std::min(most, head_.size() - head_sent_)};
  if (payload_sent_ < payload_.size())
    out[count++] = {const_cast<std::byte*>(payload_.data()) + payload_sent_, payload_.size() - payload_sent_};
  if (padding_ > 0) {
    std::size_t sent = payload_sent_ > payload_.size() ? payload_sent_ - payload_.size() : 0;
    out[count++] = {const_cast<std::byte*>(kPadding.data()), padding_ - sent};
  }
  return count;
}

bool LinkSender::pump() {
  blocked_ = held_back_ = false;
  std::size_t moved = 0;
  while (connection_.connected() && !connection_.departed() && !connection_.healing() && moved < kSendBudgetBytes) {
    const bool again = kept_ && kept_->rewound();
    if (!again && !frame_under_way()) {
      finish_frame();
      if (!stage_next()) break;
    }
    std::array<iovec, 3> out;
    const std::size_t count = again ? kept_->pieces(out) : pieces(out);
    IoResult result = connection_.channel().send(std::span(out.data(), count));
    blocked_ = result.status == IoStatus::kWouldBlock;
    held_back_ = result.status == IoStatus::kHeldBack;
    if (blocked_ || held_back_) break;
    if (result.status != IoStatus::kOk) {
      events_.closed(result.error_number);
      break;
    }
    moved += result.bytes;
    bytes_sent_.fetch_add(result.bytes, std::memory_order_relaxed);
    stream_sent_ += result.bytes;
    if (again) {
      kept_->sent(result.bytes);
      continue;
    }
    std::size_t of_head = std::min(result.bytes, head_.size() - head_sent_);
    head_sent_ += of_head;
    payload_sent_ += result.bytes - of_head;
  }
  if (connection_.connected() && !frame_under_way()) finish_frame();
  return moved > 0;
}

}  // namespace ringdp
