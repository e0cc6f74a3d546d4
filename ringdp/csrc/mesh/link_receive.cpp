// The receiving half of a Link: it puts frames back into flows. A frame may come before this rank has started its operation;
// then its payload is kept, at most the eager window per peer, and compared when the operation starts (check_early_frames).
// Every frame's fingerprint is compared with this rank's own operation, so that a disagreement fails the group on all ranks
// instead of mixing two operations' bytes. Payload goes straight from the channel into the operation's memory where the flow
// has room for it (`incoming`, `arrived`), else into `spare_`.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/text.h"
#include "mesh/link.h"

namespace ringdp {
namespace {

constexpr std::size_t kMaxEarlyOperations = 65536;  // how many operations a peer may be ahead

std::span<const std::byte> as_const(std::span<std::byte> bytes) { return bytes; }

}  // namespace

RecvFlow* Link::find_receiver(uint64_t group, uint64_t sequence) {
  for (RecvFlow* flow : receiving_)
    if (flow->identity->group == group && flow->identity->sequence == sequence) return flow;
  return nullptr;
}

void Link::attach(RecvFlow& flow) {
  receiving_.push_back(&flow);
  wish();
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

void Link::check_early_frames(const FlowIdentity& identity) {
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
  if (!connected()) return false;
  if (damaged_) return throw_away();
  if (direct_) return pump_direct(budget_bytes);
  std::size_t moved = 0;
  bool drained = false;
  while (connected() && !departed_) {
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
    check_.add(target_.subspan(target_filled_, direct));
    target_filled_ += direct;
    stage_end_ += result.bytes - direct;
    drained = result.bytes < offered;  // asking again now would mostly answer "would block"
  }
  return moved > 0;
}

bool Link::throw_away() {
  iovec piece{stage_.data(), stage_.size()};
  IoResult result = channel_->receive(std::span(&piece, 1));
  if (result.status != IoStatus::kOk && result.status != IoStatus::kWouldBlock) on_closed(result.error_number);
  return result.status == IoStatus::kOk;
}

// Uses up staged bytes by one step: a header, or payload. False when it needs more from the channel.
bool Link::take_from_stage() {
  std::size_t staged = stage_end_ - stage_begin_;
  if (!current_) {
    if (staged < check_.head_bytes()) {
      std::memmove(stage_.data(), stage_.data() + stage_begin_, staged);
      stage_begin_ = 0;
      stage_end_ = staged;
      return false;
    }
    FrameHeader header = read_header(stage_.data() + stage_begin_);
    stage_begin_ += check_.head_bytes();
    eager_credited_ = header.credit;
    begin_frame(header);
    return true;
  }
  std::size_t part = std::min(staged, target_.size() - target_filled_);
  if (part > 0) {
    std::memcpy(target_.data() + target_filled_, stage_.data() + stage_begin_, part);
    check_.add(target_.subspan(target_filled_, part));  // while it is in the cache
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

FrameHeader Link::read_header(const std::byte* head) {
  if (!check_.accept_head(head)) fail_damaged("the header of a frame from it is not as it was sent (CRC32C)");
  try {
    return FrameHeader::decode(std::span<const std::byte, kFrameHeaderBytes>(head, kFrameHeaderBytes));
  } catch (const Error& error) {
    fail(ErrorKind::kPeerLost, error.what(), "run the same version of ringdp on all ranks");
  }
}

void Link::hand_over(RecvFlow& flow, uint64_t offset, std::span<const std::byte> bytes) {
  if (bytes.empty())
    flow.handler->arrived(flow, offset, {});
  else if (!flow.handler->take(flow, offset, bytes))
    fail(ErrorKind::kPeerLost, "it sent a segment that crosses a block's end", "report this as a bug of ringdp");
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
  if (header.length == 0) finish_payload();
}

void Link::begin_data(const FrameHeader& header) {
  RecvFlow* flow = find_receiver(header.group, header.sequence);
  if (flow != nullptr && accept(*flow, header)) {
    target_ = {};
    target_flow_ = flow;
    if (direct_ || header.length == 0) return;
    target_ = flow->handler->incoming(*flow, header.offset, header.length);
    if (target_.size() != header.length)
      fail(ErrorKind::kPeerLost, "it sent a segment that crosses a block's end", "report this as a bug of ringdp");
    return;
  }
  dropping_ = flow != nullptr || discarded_.contains(header.group) || no_flow_waits_for(header);
  if (!dropping_) {
    // The operation has not started here yet. This rank stores no more unrequested payload than the window it announced.
    if (!header.eager && header.length > 0)
      fail(ErrorKind::kPeerLost, "it sent bytes that this rank did not ask for", "report this as a bug of ringdp");
    if (early_bytes_ + header.length > kEagerWindowBytes || early_.size() >= kMaxEarlyOperations)
      fail(ErrorKind::kPeerLost, "it sent more than the window it was given", "report this as a bug of ringdp");
  }
  spare_.resize(header.length);
  target_ = spare_;
}

// True if both sides mean the same operation, and the frame is the next piece of the flow.
bool Link::accept(RecvFlow& flow, const FrameHeader& header) {
  const FlowIdentity& mine = *flow.identity;
  if (header.fingerprint != mine.fingerprint) {
    report_mismatch(mine, header);
    return false;
  }
  if (mine.counts_differ && header.shape.count != mine.elements(flow.total)) {
    FlowIdentity pair = mine;
    pair.shape.count = mine.elements(flow.total);
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

// The peer announces that it takes part in an operation in which it only receives from this rank, or it is in another one.
bool Link::no_flow_waits_for(const FrameHeader& header) {
  Started known = events_.started(header.group, header.sequence);
  if (!known.started) return false;
  if (known.identity != nullptr && known.identity->fingerprint != header.fingerprint)
    report_mismatch(*known.identity, header);
  return true;
}

// Bytes that waited in a buffer of ours, in as many parts as the operation has blocks for them.
void Link::deliver(RecvFlow& flow, const FrameHeader& header, std::span<const std::byte> bytes) {
  flow.received += bytes.size();
  flow.opened = true;
  if (flow.complete()) std::erase(receiving_, &flow);
  hand_over(flow, header.offset, bytes);
}

void Link::finish_payload() {
  FrameHeader header = *current_;
  if (!check_.payload_is_whole())
    fail_damaged("the " + std::to_string(header.length) +
                 " bytes of a frame from it are not as they were sent (CRC32C)");
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
  if (no_flow_waits_for(header)) return consume(header);
  auto& frames = early_[{header.group, header.sequence}].frames;
  // Empty frames use up no window, so an operation may have one only: it announces the peer, or is its whole payload.
  bool again = std::any_of(frames.begin(), frames.end(), [](const auto& it) { return it.second.empty(); });
  if (spare_.empty() && again)
    fail(ErrorKind::kPeerLost, "it announced an operation twice", "report this as a bug of ringdp");
  early_bytes_ += spare_.size();
  frames.emplace_back(header, std::move(spare_));
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

// Eager payload has left the window; the next frame tells the peer so, or a frame of its own once half the window is due.
void Link::consume(const FrameHeader& header) {
  if (!header.eager) return;
  consumed_ += header.length;
  if (static_cast<uint32_t>(consumed_ - consumed_reported_) >= kEagerWindowBytes / 2)
    append_control(FrameType::kCredit, 0, 0, 0);
}

}  // namespace ringdp
