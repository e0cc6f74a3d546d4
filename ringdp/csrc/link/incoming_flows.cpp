#include "link/incoming_flows.h"

#include <algorithm>
#include <string>
#include <utility>

namespace ringdp {

bool EarlyFrames::keep(const FrameHeader& header, std::vector<std::byte> payload) {
  auto& frames = kept_[{header.group, header.sequence}].frames;
  const bool again = std::any_of(frames.begin(), frames.end(), [](const Frame& it) { return it.payload.empty(); });
  if (payload.empty() && again) return false;
  bytes_ += payload.size();
  frames.push_back({header, std::move(payload)});
  return true;
}

bool EarlyFrames::request(uint64_t group, uint64_t sequence) {
  if (full()) return false;
  kept_[{group, sequence}].requested = true;
  return true;
}

std::optional<EarlyFrames::Kept> EarlyFrames::take(uint64_t group, uint64_t sequence) {
  auto found = kept_.extract({group, sequence});
  if (!found) return std::nullopt;
  for (const Frame& frame : found.mapped().frames) bytes_ -= frame.payload.size();
  return std::move(found.mapped());
}

std::vector<FrameHeader> EarlyFrames::discard(uint64_t group) {
  std::vector<FrameHeader> gone;
  std::erase_if(kept_, [&](const auto& entry) {
    if (entry.first.first != group) return false;
    for (const Frame& frame : entry.second.frames) {
      bytes_ -= frame.payload.size();
      gone.push_back(frame.header);
    }
    return true;
  });
  return gone;
}

namespace {

constexpr const char* kReportBug = "report this as a bug of ringdp";

}  // namespace

RecvFlow* IncomingFlows::find(uint64_t group, uint64_t sequence) const {
  for (RecvFlow* flow : receiving_)
    if (flow->identity->group == group && flow->identity->sequence == sequence) return flow;
  return nullptr;
}

void IncomingFlows::attach(RecvFlow& flow) {
  receiving_.push_back(&flow);
  sender_.wish();
  if (auto early = early_.take(flow.identity->group, flow.identity->sequence)) {
    for (auto& [header, payload] : early->frames) {
      if (accept(flow, header)) deliver(flow, header, payload);
      consume(header);
      early_.give_back(std::move(payload));
    }
    if (early->requested && !flow.complete()) flow.granted = 1;  // below: answer although the flow is small
  }
  if (flow.total > kSmallFlowBytes || flow.granted != 0) {
    flow.granted = 0;
    grant(flow);
  }
}

void IncomingFlows::widen(RecvFlow& flow) {
  if (flow.total > kSmallFlowBytes || flow.granted != 0) grant(flow);
}

void IncomingFlows::grant(RecvFlow& flow) {
  uint64_t limit = std::min(flow.window, flow.total);
  if (limit <= flow.granted) return;
  flow.granted = limit;
  sender_.control(FrameHeader::of(FrameType::kGrant, flow.identity->group, flow.identity->sequence, limit));
}

void IncomingFlows::check_early_frames(const FlowIdentity& identity) {
  const auto early = early_.take(identity.group, identity.sequence);
  if (!early) return;
  for (const auto& [header, payload] : early->frames) {
    consume(header);
    if (header.fingerprint != identity.fingerprint) report_mismatch(identity, header);
  }
}

void IncomingFlows::discard_group(uint64_t group) {
  discarded_.insert(group);
  for (const FrameHeader& header : early_.discard(group)) consume(header);
}

bool IncomingFlows::accept(RecvFlow& flow, const FrameHeader& header) {
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
    connection_.fail(ErrorKind::kPeerLost,
                     "it sent bytes " + std::to_string(header.offset) + " to " +
                         std::to_string(header.offset + header.length) + " of " + mine.text() + " where " +
                         std::to_string(flow.received) + " was next",
                     kReportBug);
  return true;
}

// The peer announces an operation in which it only receives from this rank, or is in another operation.
bool IncomingFlows::has_started(const FrameHeader& header) {
  const StartedOperation known = events_.started(header.group, header.sequence);
  if (!known.started) return false;
  if (known.identity != nullptr && known.identity->fingerprint != header.fingerprint)
    report_mismatch(*known.identity, header);
  return true;
}

void IncomingFlows::report_mismatch(const FlowIdentity& mine, const FrameHeader& header) {
  discarded_.insert(mine.group);
  events_.mismatched({mine, header, connection_.peer().rank});
}

// This rank stores no more unrequested payload than the window it announced.
bool IncomingFlows::keeps(const FrameHeader& header) {
  if (discarded_.contains(header.group) || has_started(header)) return false;
  if (!header.eager && header.length > 0)
    connection_.fail(ErrorKind::kPeerLost, "it sent bytes that this rank did not ask for", kReportBug);
  if (!early_.fits(header.length))
    connection_.fail(ErrorKind::kPeerLost, "it sent more than the window it was given", kReportBug);
  return true;
}

// The operation may have started, or its group may have failed, while its first frame was still arriving.
void IncomingFlows::keep(const FrameHeader& header, std::vector<std::byte>& payload) {
  if (discarded_.contains(header.group)) return consume(header);
  if (RecvFlow* flow = find(header.group, header.sequence)) {
    if (accept(*flow, header)) deliver(*flow, header, payload);
    return consume(header);
  }
  if (has_started(header)) return consume(header);
  if (!early_.keep(header, std::exchange(payload, early_.spare())))
    connection_.fail(ErrorKind::kPeerLost, "it announced an operation twice", kReportBug);
}

void IncomingFlows::advance(RecvFlow& flow, std::size_t bytes, bool last) {
  flow.received += bytes;
  if (flow.record != nullptr) flow.record->note(flow.received);
  if (!last) return;
  flow.opened = true;
  if (flow.complete()) std::erase(receiving_, &flow);
}

// In one part for each of the operation's blocks.
void IncomingFlows::hand_over(RecvFlow& flow, uint64_t offset, std::span<const std::byte> bytes) const {
  FlowRecord* const record = flow.work_record(bytes.size());
  if (bytes.empty())
    flow.handler->arrived(flow, offset, {});
  else if (!flow.handler->take(flow, offset, bytes))
    connection_.fail(ErrorKind::kPeerLost, "it sent a segment that crosses a block's end", kReportBug);
  if (record != nullptr) record->note_work(record->last_ns.load(std::memory_order_relaxed));
}

void IncomingFlows::deliver(RecvFlow& flow, const FrameHeader& header, std::span<const std::byte> bytes) {
  advance(flow, bytes.size(), true);
  hand_over(flow, header.offset, bytes);
}

void IncomingFlows::consume(const FrameHeader& header) {
  if (header.eager) sender_.consumed(header.length);
}

void IncomingFlows::on_grant(const FrameHeader& header) {
  if (sender_.grant(header) || discarded_.contains(header.group)) return;
  if (!sender_.window().keep_grant(header))
    connection_.fail(ErrorKind::kPeerLost, "it granted too many operations that do not exist here", kReportBug);
}

void IncomingFlows::on_request(const FrameHeader& header) {
  if (RecvFlow* flow = find(header.group, header.sequence)) return grant(*flow);
  if (!discarded_.contains(header.group) && !early_.request(header.group, header.sequence))
    connection_.fail(ErrorKind::kPeerLost, "it asked for too many operations that do not exist here", kReportBug);
}

}  // namespace ringdp
