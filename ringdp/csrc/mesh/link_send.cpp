// The sending half of a Link: control frames first, then the flows, oldest operation first, one frame at a time. A flow may go
// as far as the receiver has granted, and eagerly beyond that for its first kSmallFlowBytes, while the peer's window has room:
// so small messages need no round trip, and a slow rank holds large ones back. A frame that has begun is always finished, from a
// copy if its operation has ended, because the peer would otherwise take the next header for payload.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/text.h"
#include "mesh/link.h"

namespace ringdp {
namespace {

constexpr std::size_t kSendBudgetBytes = 1024 * 1024;  // one call serves one peer no longer than this
constexpr std::size_t kMaxTalkBytes = 64 * 1024;       // questions and answers kept for a peer that does not read
constexpr std::array<std::byte, Channel::kDirectAlignment> kPadding{};
constexpr std::size_t kControlPieceBytes =
    400;                                      // of control frames alone, in one packet (the least MTU of IPv4 is 576)
constexpr std::size_t kLeastEagerBytes = 64;  // less is not worth a frame, and may be less than operations can cut

}  // namespace

void Link::attach(SendFlow& flow) {
  auto grant = early_grants_.find({flow.identity->group, flow.identity->sequence});
  if (grant != early_grants_.end()) {
    flow.granted = std::min(grant->second, flow.total);
    early_grants_.erase(grant);
  }
  sending_.push_back(&flow);
  wish();
}

void Link::detach(SendFlow& flow) {
  std::erase(sending_, &flow);
  if (payload_flow_ != &flow) return;
  // Half of the frame is sent: the other half comes from a copy.
  payload_flow_ = nullptr;
  orphan_.assign(payload_.begin(), payload_.end());
  payload_ = orphan_;
}

// How many bytes beyond flow.sent may go now. Bytes beyond the grant are eager: within the flow's first kSmallFlowBytes and
// the peer's window. A larger flow never ends before its last grant has come, so no grant arrives too late.
std::size_t Link::allowance(const SendFlow& flow) const {
  if (flow.sent < flow.granted) return flow.granted - flow.sent;
  if (flow.requested) return 0;
  uint64_t eager_end = std::min<uint64_t>(flow.total, kSmallFlowBytes);
  if (flow.sent >= eager_end) return 0;
  std::size_t window = kEagerWindowBytes - static_cast<uint32_t>(eager_sent_ - eager_credited_);
  std::size_t rest = eager_end - flow.sent;
  if (window < rest && window < kLeastEagerBytes) return 0;
  return std::min(rest, window);
}

bool Link::sendable(const SendFlow& flow) const {
  if (flow.total == 0) return !flow.opened;
  return flow.ready > flow.sent && allowance(flow) > 0;
}

// A small flow that finds the window used up asks for its grant. Once asked, it waits for that, so none comes too late.
bool Link::must_request(const SendFlow& flow) const {
  bool small = flow.total > 0 && flow.total <= kSmallFlowBytes;
  return small && !flow.requested && flow.granted == 0 && flow.ready > flow.sent && allowance(flow) == 0;
}

void Link::wish() {
  if (connected() || wished_ || !usable()) return;
  wished_ = true;
  events_.wanted(peer_.rank);
}

bool Link::has_outgoing() const {
  if (!connected() || departed_) return false;
  if (frame_under_way() || !control_.empty()) return true;
  return !said_bye_ && std::any_of(sending_.begin(), sending_.end(),
                                   [this](SendFlow* flow) { return sendable(*flow) || must_request(*flow); });
}

void Link::append_control(FrameHeader header, const std::string& payload) {
  if (said_bye_) return;
  if (!connected()) {
    waiting_.emplace_back(header, payload);
    return wish();
  }
  header.length = static_cast<uint32_t>(payload.size());
  header.credit = consumed_reported_ = consumed_;
  std::size_t at = control_.size();
  control_.resize(at + check_.head_bytes() + payload.size() + padding_of(payload.size()));
  check_.write_head(header, std::as_bytes(std::span(payload)), control_.data() + at);
  if (!payload.empty()) std::memcpy(control_.data() + at + check_.head_bytes(), payload.data(), payload.size());
}

void Link::append_control(FrameType type, uint64_t group, uint64_t sequence, uint64_t offset,
                          const std::string& payload) {
  FrameHeader header;
  header.type = type;
  header.group = group;
  header.sequence = sequence;
  header.offset = offset;
  append_control(header, payload);
}

void Link::announce(const FlowIdentity& identity) {
  if (broken_ || departed_) return;
  FrameHeader header;
  header.group = identity.group;
  header.sequence = identity.sequence;
  header.fingerprint = identity.fingerprint;
  header.shape = identity.shape;
  append_control(header);
}

void Link::send_abort(uint64_t group, const AbortNotice& notice) {
  if (!broken_ && !departed_) append_control(FrameType::kAbort, group, notice.sequence, 0, notice.encode());
}

void Link::send_bye(const std::string& reason) {
  if (!connected() || departed_) return;
  append_control(FrameType::kBye, 0, 0, 0, clean_text(reason, kReasonBytes));
  said_bye_ = true;
}

void Link::send_ping(uint64_t group, uint64_t sequence) {
  if (!broken_ && !departed_ && control_.size() < kMaxTalkBytes) append_control(FrameType::kPing, group, sequence, 0);
}

void Link::send_pong(uint64_t group, uint64_t sequence, const PeerState& state) {
  if (!broken_ && !departed_ && control_.size() < kMaxTalkBytes)
    append_control(FrameType::kPong, group, sequence, 0, state.encode());
}

bool Link::stage_next() {
  head_.clear();
  head_sent_ = 0;
  payload_ = {};
  payload_sent_ = 0;
  padding_ = 0;
  payload_flow_ = nullptr;
  for (SendFlow* flow : sending_) {
    if (!must_request(*flow)) continue;
    flow->requested = true;
    append_control(FrameType::kRequest, flow->identity->group, flow->identity->sequence, 0);
  }
  std::swap(head_, control_);
  if (said_bye_) return !head_.empty();
  auto next = std::find_if(sending_.begin(), sending_.end(), [this](SendFlow* flow) { return sendable(*flow); });
  if (next == sending_.end()) return !head_.empty();
  SendFlow& flow = **next;
  FrameHeader header;
  std::size_t limit = std::min<uint64_t>({segment_bytes_, allowance(flow), flow.ready - flow.sent});
  if (flow.total > 0) payload_ = flow.handler->outgoing(flow, flow.sent, limit);
  if (flow.total > 0 && payload_.empty()) return !head_.empty();  // less than one element is allowed: wait for more
  payload_flow_ = &flow;
  padding_ = padding_of(payload_.size());
  header.eager = flow.sent >= flow.granted;
  if (header.eager) eager_sent_ += static_cast<uint32_t>(payload_.size());
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
  return true;
}

void Link::finish_frame_sent() {
  SendFlow* flow = std::exchange(payload_flow_, nullptr);
  std::size_t sent = payload_.size();
  payload_ = {};
  payload_sent_ = 0;
  padding_ = 0;
  head_.clear();
  head_sent_ = 0;
  orphan_.clear();
  if (flow == nullptr) return;
  flow->sent += sent;
  flow->opened = true;
  if (flow->complete()) std::erase(sending_, flow);
  flow->handler->flushed(*flow);
}

bool Link::pump_send() {
  blocked_ = false;
  std::size_t moved = 0;
  while (connected() && !departed_ && moved < kSendBudgetBytes) {
    if (!frame_under_way()) {
      finish_frame_sent();
      if (!stage_next()) break;
    }
    std::array<iovec, 3> pieces;
    std::size_t count = 0;
    // An abort or goodbye must pass also where large packets do not.
    const bool only_control = payload_.empty() && !direct_;
    const std::size_t most = only_control ? kControlPieceBytes : head_.size();
    if (head_sent_ < head_.size())
      pieces[count++] = {head_.data() + head_sent_, std::min(most, head_.size() - head_sent_)};
    if (payload_sent_ < payload_.size())
      pieces[count++] = {const_cast<std::byte*>(payload_.data()) + payload_sent_, payload_.size() - payload_sent_};
    if (padding_ > 0) {
      std::size_t sent = payload_sent_ > payload_.size() ? payload_sent_ - payload_.size() : 0;
      pieces[count++] = {const_cast<std::byte*>(kPadding.data()), padding_ - sent};
    }
    IoResult result = channel_->send(std::span(pieces.data(), count));
    if (result.status == IoStatus::kWouldBlock) {
      blocked_ = true;
      break;
    }
    if (result.status != IoStatus::kOk) {
      // The peer is gone; its last frames may explain why.
      while (!departed_ && pump_receive(kSendBudgetBytes)) {
      }
      if (!departed_) on_closed(result.error_number);
      break;
    }
    moved += result.bytes;
    bytes_sent_.fetch_add(result.bytes, std::memory_order_relaxed);
    std::size_t of_head = std::min(result.bytes, head_.size() - head_sent_);
    head_sent_ += of_head;
    payload_sent_ += result.bytes - of_head;
  }
  if (connected() && !frame_under_way()) finish_frame_sent();
  return moved > 0;
}

}  // namespace ringdp
