#include "mesh/link.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>

#include "base/text.h"

namespace ringdp {
namespace {

constexpr std::size_t kStageBytes = 16 * 1024;         // read-ahead: several small frames in one system call
constexpr std::size_t kSendBudgetBytes = 1024 * 1024;  // one call serves one peer no longer than this
constexpr std::size_t kMaxEarlyOperations = 65536;     // how many operations a peer may be ahead
constexpr std::size_t kLeastEagerBytes = 64;  // less is not worth a frame, and may be less than operations can cut

uint64_t count_of(const FlowIdentity& identity, uint64_t bytes) {
  return bytes / std::max<std::size_t>(1, dtype_size(identity.shape.dtype));
}

std::span<const std::byte> as_const(std::span<std::byte> bytes) { return bytes; }

}  // namespace

std::string PeerInfo::text() const {
  return "rank " + std::to_string(rank) + " (host " + host + ", pid " + std::to_string(pid) + ")";
}

std::string FlowIdentity::place() const {
  if (!between.empty()) return between;
  return (sequence & kCallbackBit) != 0 ? "in a callback" : "#" + std::to_string(sequence);
}

std::string FlowIdentity::text() const {
  std::string whole = shape.text();
  auto paren = whole.find('(');
  std::string out = whole.substr(0, paren);
  out += " " + place();
  if (paren != std::string::npos) out += " " + whole.substr(paren);
  if (!name.empty()) out += " '" + name + "'";
  return out;
}

Link::Link(PeerInfo self, PeerInfo peer, std::unique_ptr<Channel> channel, Events events)
    : self_(std::move(self)),
      peer_(std::move(peer)),
      channel_(std::move(channel)),
      events_(std::move(events)),
      stage_(kStageBytes) {}

// ---- Sending ----

void Link::attach(SendFlow& flow) {
  auto grant = early_grants_.find({flow.identity->group, flow.identity->sequence});
  if (grant != early_grants_.end()) {
    flow.granted = std::min(grant->second, flow.total);
    early_grants_.erase(grant);
  }
  sending_.push_back(&flow);
}

void Link::detach(SendFlow& flow) {
  std::erase(sending_, &flow);
  if (payload_flow_ != &flow) return;
  // Half a frame is out: the peer must get the other half, from a copy, or it would read the next header as payload.
  payload_flow_ = nullptr;
  orphan_.assign(payload_.begin(), payload_.end());
  payload_ = orphan_;
}

// What may go now beyond flow.sent. Beyond the grant it is eager: within the flow's first kSmallFlowBytes and within the
// peer's window. A flow above that size never ends before its last grant has come, so no grant arrives too late.
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

bool Link::has_outgoing() const {
  if (broken_ || departed_) return false;
  if (head_sent_ < head_.size() || payload_sent_ < payload_.size() || !control_.empty()) return true;
  return std::any_of(sending_.begin(), sending_.end(),
                     [this](SendFlow* flow) { return sendable(*flow) || must_request(*flow); });
}

void Link::append_control(FrameHeader header, const std::string& payload) {
  header.length = static_cast<uint32_t>(payload.size());
  header.credit = consumed_told_ = consumed_;
  std::size_t at = control_.size();
  control_.resize(at + kFrameHeaderBytes + payload.size());
  header.encode(std::span<std::byte, kFrameHeaderBytes>(control_.data() + at, kFrameHeaderBytes));
  if (!payload.empty()) std::memcpy(control_.data() + at + kFrameHeaderBytes, payload.data(), payload.size());
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
  if (!broken_ && !departed_) append_control(FrameType::kBye, 0, 0, 0, clean_text(reason, kReasonBytes));
}

void Link::send_ping(uint64_t group, uint64_t sequence) {
  if (!broken_ && !departed_) append_control(FrameType::kPing, group, sequence, 0);
}

void Link::send_pong(uint64_t group, uint64_t sequence, const PeerState& state) {
  if (!broken_ && !departed_) append_control(FrameType::kPong, group, sequence, 0, state.encode());
}

void Link::watch_host(int64_t silence_ms) {
  silence_ms_ = silence_ms;
  channel_->watch_host(silence_ms);
}

void Link::check_host() {
  if (broken_ || departed_ || silence_ms_ == 0 || channel_->host_silence_ms() < silence_ms_) return;
  fail(ErrorKind::kPeerLost, "its host has not answered for " + std::to_string(silence_ms_) + " ms",
       "look whether that host is up and the network between reaches it");
}

void Link::close() {
  broken_ = true;
  channel_.reset();
}

bool Link::stage_next() {
  head_.clear();
  head_sent_ = 0;
  payload_ = {};
  payload_sent_ = 0;
  payload_flow_ = nullptr;
  for (SendFlow* flow : sending_) {
    if (!must_request(*flow)) continue;
    flow->requested = true;
    append_control(FrameType::kRequest, flow->identity->group, flow->identity->sequence, 0);
  }
  std::swap(head_, control_);
  auto next = std::find_if(sending_.begin(), sending_.end(), [this](SendFlow* flow) { return sendable(*flow); });
  if (next == sending_.end()) return !head_.empty();
  SendFlow& flow = **next;
  FrameHeader header;
  std::size_t limit = std::min<uint64_t>({segment_bytes_, allowance(flow), flow.ready - flow.sent});
  if (flow.total > 0) payload_ = flow.handler->outgoing(flow, flow.sent, limit);
  if (flow.total > 0 && payload_.empty()) return !head_.empty();  // less than one element is allowed: wait for more
  payload_flow_ = &flow;
  header.eager = flow.sent >= flow.granted;
  if (header.eager) eager_sent_ += static_cast<uint32_t>(payload_.size());
  header.length = static_cast<uint32_t>(payload_.size());
  header.group = flow.identity->group;
  header.sequence = flow.identity->sequence;
  header.offset = flow.sent;
  header.fingerprint = flow.identity->fingerprint;
  header.shape = flow.identity->shape;
  if (flow.identity->counts_differ) header.shape.count = count_of(*flow.identity, flow.total);
  header.credit = consumed_told_ = consumed_;
  std::size_t at = head_.size();
  head_.resize(at + kFrameHeaderBytes);
  header.encode(std::span<std::byte, kFrameHeaderBytes>(head_.data() + at, kFrameHeaderBytes));
  return true;
}

void Link::finish_frame_sent() {
  SendFlow* flow = std::exchange(payload_flow_, nullptr);
  std::size_t sent = payload_.size();
  payload_ = {};
  payload_sent_ = 0;
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
  while (!broken_ && !departed_ && moved < kSendBudgetBytes) {
    if (head_sent_ == head_.size() && payload_sent_ == payload_.size()) {
      finish_frame_sent();
      if (!stage_next()) break;
    }
    std::array<iovec, 2> pieces;
    std::size_t count = 0;
    if (head_sent_ < head_.size()) pieces[count++] = {head_.data() + head_sent_, head_.size() - head_sent_};
    if (payload_sent_ < payload_.size())
      pieces[count++] = {const_cast<std::byte*>(payload_.data()) + payload_sent_, payload_.size() - payload_sent_};
    IoResult result = channel_->send(std::span(pieces.data(), count));
    if (result.status == IoStatus::kWouldBlock) {
      blocked_ = true;
      break;
    }
    if (result.status != IoStatus::kOk) {
      // The peer is gone; what it said last may explain it.
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
  if (!broken_ && head_sent_ == head_.size() && payload_sent_ == payload_.size()) finish_frame_sent();
  return moved > 0;
}

// ---- Receiving ----

RecvFlow* Link::find_receiver(uint64_t group, uint64_t sequence) {
  for (RecvFlow* flow : receiving_)
    if (flow->identity->group == group && flow->identity->sequence == sequence) return flow;
  return nullptr;
}

void Link::attach(RecvFlow& flow) {
  receiving_.push_back(&flow);
  auto found = early_.find({flow.identity->group, flow.identity->sequence});
  if (found != early_.end()) {
    Early early = std::move(found->second);
    early_.erase(found);
    for (auto& [header, bytes] : early.frames) {
      early_bytes_ -= bytes.size();
      if (accept(flow, header)) deliver(flow, header, bytes);
      consume(header);
    }
    if (early.requested && !flow.complete()) flow.granted = 1;  // below: answer although the flow is small
  }
  if (flow.total > kSmallFlowBytes || flow.granted != 0) {
    flow.granted = 0;
    grant(flow);
  }
}

void Link::widen(RecvFlow& flow) {
  if (flow.total > kSmallFlowBytes || flow.granted != 0) grant(flow);
}

void Link::grant(RecvFlow& flow) {
  uint64_t limit = std::min(flow.window, flow.total);
  if (limit <= flow.granted) return;
  flow.granted = limit;
  append_control(FrameType::kGrant, flow.identity->group, flow.identity->sequence, limit);
}

void Link::settle_early(const FlowIdentity& identity) {
  if (early_.empty()) return;
  auto found = early_.find({identity.group, identity.sequence});
  if (found == early_.end()) return;
  for (auto& [header, bytes] : found->second.frames) {
    early_bytes_ -= bytes.size();
    consume(header);
    if (header.fingerprint != identity.fingerprint) report_mismatch(identity, header);
  }
  early_.erase(found);
}

void Link::detach(RecvFlow& flow) {
  std::erase(receiving_, &flow);
  if (target_flow_ != &flow) return;
  target_flow_ = nullptr;  // its memory may be gone: the rest of the payload goes nowhere
  dropping_ = true;
  spare_.resize(target_.size());
  target_ = spare_;
}

void Link::discard_group(uint64_t group) {
  discarded_.insert(group);
  std::erase_if(early_, [&](auto& entry) {
    if (entry.first.first != group) return false;
    for (auto& [header, bytes] : entry.second.frames) {
      early_bytes_ -= bytes.size();
      consume(header);
    }
    return true;
  });
  std::erase_if(early_grants_, [&](auto& entry) { return entry.first.first == group; });
}

bool Link::pump_receive(std::size_t budget_bytes) {
  std::size_t moved = 0;
  bool drained = false;
  while (!broken_ && !departed_) {
    if (take_from_stage()) continue;
    if (drained || moved >= budget_bytes) break;
    std::array<iovec, 2> pieces;
    std::size_t count = 0, offered = 0, wanted = 0;
    if (current_) {
      wanted = target_.size() - target_filled_;
      pieces[count++] = {target_.data() + target_filled_, wanted};
    }
    pieces[count++] = {stage_.data() + stage_end_, stage_.size() - stage_end_};
    offered = wanted + stage_.size() - stage_end_;
    IoResult result = channel_->receive(std::span(pieces.data(), count));
    if (result.status == IoStatus::kWouldBlock) break;
    if (result.status != IoStatus::kOk) {
      on_closed(result.status == IoStatus::kClosed ? 0 : result.error_number);
      break;
    }
    moved += result.bytes;
    bytes_received_.fetch_add(result.bytes, std::memory_order_relaxed);
    std::size_t direct = std::min(wanted, result.bytes);
    target_filled_ += direct;
    stage_end_ += result.bytes - direct;
    drained = result.bytes < offered;  // asking again now would mostly answer "would block"
  }
  return moved > 0;
}

// Uses up staged bytes by one step: a header, or payload. False when it needs more from the channel.
bool Link::take_from_stage() {
  std::size_t staged = stage_end_ - stage_begin_;
  if (!current_) {
    if (staged < kFrameHeaderBytes) {
      std::memmove(stage_.data(), stage_.data() + stage_begin_, staged);
      stage_begin_ = 0;
      stage_end_ = staged;
      return false;
    }
    FrameHeader header;
    try {
      header = FrameHeader::decode(
          std::span<const std::byte, kFrameHeaderBytes>(stage_.data() + stage_begin_, kFrameHeaderBytes));
    } catch (const Error& error) {
      fail(ErrorKind::kPeerLost, error.what(), "run the same version of ringdp on all ranks");
    }
    stage_begin_ += kFrameHeaderBytes;
    eager_credited_ = header.credit;
    begin_frame(header);
    return true;
  }
  std::size_t part = std::min(staged, target_.size() - target_filled_);
  if (part > 0) {
    std::memcpy(target_.data() + target_filled_, stage_.data() + stage_begin_, part);
    target_filled_ += part;
    stage_begin_ += part;
  }
  if (target_filled_ == target_.size()) {
    finish_payload();
    return true;
  }
  stage_begin_ = stage_end_ = 0;  // all used: what follows is read straight into the target
  return false;
}

void Link::begin_frame(const FrameHeader& header) {
  current_ = header;
  target_filled_ = 0;
  target_flow_ = nullptr;
  dropping_ = false;
  if (header.type == FrameType::kData) {
    begin_data(header);
  } else {
    spare_.resize(header.length);
    target_ = spare_;
  }
  if (target_.empty()) finish_payload();
}

void Link::begin_data(const FrameHeader& header) {
  RecvFlow* flow = find_receiver(header.group, header.sequence);
  if (flow != nullptr && accept(*flow, header)) {
    if (header.length == 0) {
      target_ = {};
      target_flow_ = flow;
      return;
    }
    target_ = flow->handler->incoming(*flow, header.offset, header.length);
    if (target_.size() != header.length)
      fail(ErrorKind::kPeerLost, "it sent a segment that crosses a block's end", "report this as a bug of ringdp");
    target_flow_ = flow;
    return;
  }
  dropping_ = flow != nullptr || discarded_.contains(header.group) || nobody_waits_for(header);
  if (!dropping_) {
    // Not started here yet. Nothing unasked for is stored beyond the window this rank announced.
    if (!header.eager && header.length > 0)
      fail(ErrorKind::kPeerLost, "it sent bytes that nobody asked for", "report this as a bug of ringdp");
    if (early_bytes_ + header.length > kEagerWindowBytes || early_.size() >= kMaxEarlyOperations)
      fail(ErrorKind::kPeerLost, "it sent more than the window it was given", "report this as a bug of ringdp");
  }
  spare_.resize(header.length);
  target_ = spare_;
}

// Do both sides mean the same operation, and is this the next piece of it?
bool Link::accept(RecvFlow& flow, const FrameHeader& header) {
  const FlowIdentity& mine = *flow.identity;
  if (header.fingerprint != mine.fingerprint) {
    report_mismatch(mine, header);
    return false;
  }
  if (mine.counts_differ && header.shape.count != count_of(mine, flow.total)) {
    FlowIdentity pair = mine;
    pair.shape.count = count_of(mine, flow.total);
    report_mismatch(pair, header);
    return false;
  }
  if (header.offset != flow.received || header.offset + header.length > flow.total)
    fail(ErrorKind::kPeerLost,
         "it sent bytes " + std::to_string(header.offset) + " to " + std::to_string(header.offset + header.length) +
             " of " + mine.text() + " where " + std::to_string(flow.received) + " was next",
         "report this as a bug of ringdp");
  return true;
}

void Link::report_mismatch(const FlowIdentity& mine, const FrameHeader& header) {
  discarded_.insert(mine.group);
  events_.mismatched({mine, header, peer_.rank});
}

bool Link::Disagreement::name_unknown() const {
  return theirs.shape.name_hash != 0 && theirs.shape.name_hash != mine.shape.name_hash;
}

Error Link::Disagreement::explain(const PeerInfo& self, const PeerInfo& peer_info, const std::string& peer_name) const {
  std::string its = theirs.shape.text(), own = mine.shape.text();
  bool look_alike = its == own;
  if (!mine.name.empty()) own += " '" + mine.name + "'";
  if (!name_unknown())
    its += theirs.shape.name_hash == 0 ? "" : " '" + mine.name + "'";
  else
    its += peer_name.empty() ? " under another name" : " '" + peer_name + "'";
  if (look_alike && theirs.shape.name_hash == mine.shape.name_hash) its += " with another layout";
  if (look_alike && theirs.shape.name_hash == 0 && mine.shape.name_hash != 0) its += " (without a name)";
  ErrorContext context;
  context.rank = self.rank;
  context.host = self.host;
  context.peer = peer_info.rank;
  context.peer_host = peer_info.host;
  context.peer_pid = peer_info.pid;
  context.operation = mine.text();
  context.sequence = static_cast<int64_t>(mine.sequence);
  context.name = mine.name;
  context.cause = "the ranks disagree";
  context.advice = "call the same operations with the same shapes and dtypes in the same order on every rank";
  return Error(ErrorKind::kMismatch,
               std::string("ranks disagree about ") + (mine.between.empty() ? "operation " : "a message ") +
                   mine.place() + ": " + self.text() + " does " + own + ", " + peer_info.text() + " does " + its +
                   "; " + context.advice,
               context);
}

// The peer announces that it takes part in an operation in which it only receives from this rank; or it means another one.
bool Link::nobody_waits_for(const FrameHeader& header) {
  Started known = events_.started(header.group, header.sequence);
  if (!known.started) return false;
  if (known.identity != nullptr && known.identity->fingerprint != header.fingerprint)
    report_mismatch(*known.identity, header);
  return true;
}

// Bytes that waited in a buffer of ours, in as many parts as the operation has blocks for them.
void Link::deliver(RecvFlow& flow, const FrameHeader& header, std::span<const std::byte> bytes) {
  if (!bytes.empty()) {
    std::span<std::byte> room = flow.handler->incoming(flow, header.offset, bytes.size());
    if (room.size() != bytes.size())
      fail(ErrorKind::kPeerLost, "it sent a segment that crosses a block's end", "report this as a bug of ringdp");
    std::memcpy(room.data(), bytes.data(), bytes.size());
    flow.received += bytes.size();
    flow.opened = true;
    if (flow.complete()) std::erase(receiving_, &flow);
    flow.handler->arrived(flow, header.offset, room);
    return;
  }
  flow.opened = true;
  if (flow.complete()) std::erase(receiving_, &flow);
  flow.handler->arrived(flow, header.offset, {});
}

void Link::finish_payload() {
  FrameHeader header = *current_;
  current_.reset();
  std::span<std::byte> filled = target_;
  target_ = {};
  target_filled_ = 0;
  RecvFlow* flow = std::exchange(target_flow_, nullptr);
  switch (header.type) {
    case FrameType::kData:
      if (flow != nullptr) {
        flow->received += filled.size();
        flow->opened = true;
        if (flow->complete()) std::erase(receiving_, flow);
        consume(header);
        flow->handler->arrived(*flow, header.offset, filled);
      } else if (dropping_ || discarded_.contains(header.group)) {
        consume(header);
      } else {
        keep_early(header);
      }
      break;
    case FrameType::kGrant:
      apply_grant(header);
      break;
    case FrameType::kRequest:
      apply_request(header);
      break;
    case FrameType::kCredit:
      break;
    case FrameType::kAbort:
      events_.aborted(peer_.rank, header.group, AbortNotice::decode(as_const(filled)));
      break;
    case FrameType::kBye:
      departed_ = true;
      events_.departed(peer_.rank, clean_text(text_of(filled), kReasonBytes));
      break;
    case FrameType::kPing:
      events_.asked(peer_.rank, header.group, header.sequence);
      break;
    case FrameType::kPong:
      events_.answered(peer_.rank, header.group, header.sequence, PeerState::decode(filled));
      break;
  }
}

// The operation may have started while its first frame was still arriving.
void Link::keep_early(const FrameHeader& header) {
  if (RecvFlow* flow = find_receiver(header.group, header.sequence)) {
    if (accept(*flow, header)) deliver(*flow, header, spare_);
    consume(header);
    return;
  }
  if (nobody_waits_for(header)) return consume(header);
  early_bytes_ += spare_.size();
  early_[{header.group, header.sequence}].frames.emplace_back(header, std::move(spare_));
  spare_ = {};
}

void Link::apply_grant(const FrameHeader& header) {
  for (SendFlow* flow : sending_) {
    if (flow->identity->group != header.group || flow->identity->sequence != header.sequence) continue;
    flow->granted = std::min(std::max(flow->granted, header.offset), flow->total);
    return;
  }
  if (discarded_.contains(header.group)) return;
  if (early_grants_.size() >= kMaxEarlyOperations)
    fail(ErrorKind::kPeerLost, "it granted too many operations that do not exist here",
         "report this as a bug of ringdp");
  uint64_t& kept = early_grants_[{header.group, header.sequence}];
  kept = std::max(kept, header.offset);
}

void Link::apply_request(const FrameHeader& header) {
  if (RecvFlow* flow = find_receiver(header.group, header.sequence)) {
    grant(*flow);
  } else if (!discarded_.contains(header.group)) {
    if (early_.size() >= kMaxEarlyOperations)
      fail(ErrorKind::kPeerLost, "it asked for too many operations that do not exist here",
           "report this as a bug of ringdp");
    early_[{header.group, header.sequence}].requested = true;
  }
}

// Eager payload has left the window; the peer hears of it with the next frame, or at once when half the window is due.
void Link::consume(const FrameHeader& header) {
  if (!header.eager) return;
  consumed_ += header.length;
  if (static_cast<uint32_t>(consumed_ - consumed_told_) >= kEagerWindowBytes / 2)
    append_control(FrameType::kCredit, 0, 0, 0);
}

void Link::on_closed(int error_number) {
  if (departed_) return;
  if (error_number == ETIMEDOUT || error_number == EHOSTUNREACH || error_number == EHOSTDOWN ||
      error_number == ENETUNREACH)
    fail(ErrorKind::kPeerLost, "its host does not answer any more: " + errno_text(error_number),
         "look whether that host is up and the network between reaches it");
  fail(ErrorKind::kPeerLost, error_number == 0 ? "the connection ended without a goodbye" : errno_text(error_number),
       "look at that rank's own log: it crashed, was killed (out of memory?) or its host is gone");
}

void Link::fail(ErrorKind kind, const std::string& what, const std::string& advice) const {
  ErrorContext context;
  context.rank = self_.rank;
  context.host = self_.host;
  context.peer = peer_.rank;
  context.peer_host = peer_.host;
  context.peer_pid = peer_.pid;
  context.cause = what;
  context.advice = advice;
  throw Error(kind, peer_.text() + ": " + what, context);
}

}  // namespace ringdp
