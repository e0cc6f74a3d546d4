#include "link/link.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/text.h"

namespace ringdp {
namespace {

constexpr std::size_t kStageBytes = 16 * 1024;          // read-ahead: several small frames in one system call
constexpr std::size_t kDirectStretchBytes = 64 * 1024;  // consumed before the sender is notified of the room

}  // namespace

void LinkReceiver::opened(bool checksums) {
  check_ = FrameCheck(checksums && connection_.direct() == nullptr);
  stage_.resize(connection_.direct() != nullptr ? 0 : kStageBytes);
}

void LinkReceiver::interrupted() {
  stage_begin_ = stage_end_ = 0;
  current_.reset();
  target_ = {};
  target_filled_ = 0;
  target_flow_ = nullptr;
  dropping_ = false;
}

void LinkReceiver::detach(RecvFlow& flow) {
  if (target_flow_ != &flow) return;
  target_flow_ = nullptr;
  dropping_ = true;
  spare_.resize(target_.size());
  target_ = spare_;
}

bool LinkReceiver::pump(std::size_t budget_bytes) {
  if (!connection_.connected()) return false;
  if (connection_.damaged()) return throw_away();
  return connection_.direct() != nullptr ? pump_direct(budget_bytes) : pump_stream(budget_bytes);
}

bool LinkReceiver::pump_stream(std::size_t budget_bytes) {
  std::size_t moved = 0;
  bool drained = false;
  while (connection_.connected() && !connection_.departed()) {
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
    IoResult result = connection_.channel().receive(std::span(pieces.data(), count));
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

bool LinkReceiver::throw_away() {
  iovec piece{stage_.data(), stage_.size()};
  IoResult result = connection_.channel().receive(std::span(&piece, 1));
  if (result.status != IoStatus::kOk && result.status != IoStatus::kWouldBlock) on_closed(result.error_number);
  return result.status == IoStatus::kOk;
}

void LinkReceiver::on_closed(int error_number) {
  if (connection_.departed()) return;
  if (connection_.made_late() && bytes_received() == 0 && connection_.channel().why_ended().empty()) {
    // The peer may have left in good order before it had this connection.
    connection_.depart();
    return events_.departed(connection_.peer().rank, "it ended while they were being connected");
  }
  if (connection_.damaged()) return connection_.depart();  // nothing more is sent on it: the error was reported
  connection_.fail_closed(error_number);
}

// Processes staged bytes: a header, or payload. False if it needs more from the channel.
bool LinkReceiver::take_from_stage() {
  std::size_t staged = stage_end_ - stage_begin_;
  if (!current_) {
    if (staged < check_.head_bytes()) {
      std::memmove(stage_.data(), stage_.data() + stage_begin_, staged);
      stage_begin_ = 0;
      stage_end_ = staged;
      return false;
    }
    const std::byte* head = stage_.data() + stage_begin_;
    stage_begin_ += check_.head_bytes();
    begin_frame(head);
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

bool LinkReceiver::pump_direct(std::size_t budget_bytes) {
  std::size_t moved = 0;
  while (!connection_.broken() && !connection_.departed() && moved < budget_bytes) {
    std::span<const std::byte> bytes;
    IoStatus status = connection_.direct()->peek(bytes);
    if (status == IoStatus::kWouldBlock) break;
    if (status != IoStatus::kOk) {
      on_closed(status == IoStatus::kClosed ? 0 : EPROTO);
      break;
    }
    std::size_t used = take_direct(bytes);
    if (used == 0) break;
    moved += used;
    bytes_received_.fetch_add(used, std::memory_order_relaxed);
    connection_.direct()->consume(used);
  }
  return moved > 0;
}

// Processes frames, or parts of one, in the transport's memory, a stretch at a time, so that its room is free soon.
std::size_t LinkReceiver::take_direct(std::span<const std::byte> bytes) {
  std::size_t used = 0;
  while (used < kDirectStretchBytes && !connection_.departed()) {
    std::size_t rest = bytes.size() - used;
    if (!current_) {
      if (rest < kFrameHeaderBytes) break;
      const std::byte* head = bytes.data() + used;
      used += kFrameHeaderBytes;
      begin_frame(head);
      continue;
    }
    const FrameHeader& header = *current_;
    std::size_t length = header.length, whole = length + DirectReader::padding_of(length);
    std::size_t part = std::min({rest, whole - target_filled_, kDirectStretchBytes});
    if (part < whole - target_filled_) part -= part % DirectReader::kAlignment;
    if (part == 0) break;
    std::size_t payload = target_filled_ < length ? std::min(part, length - target_filled_) : 0;
    std::span<const std::byte> data = bytes.subspan(used, payload);
    const uint64_t offset = header.offset + target_filled_;
    used += part;
    target_filled_ += part;
    const bool last = target_filled_ == whole;
    if (target_flow_ == nullptr) {
      if (!dropping_ && payload > 0) std::memcpy(spare_.data() + (target_filled_ - part), data.data(), payload);
      if (last) finish_payload();
      continue;
    }
    RecvFlow& flow = *target_flow_;
    flows_.advance(flow, payload, last);
    if (last) {
      flows_.consume(header);
      current_.reset();
      target_flow_ = nullptr;
    }
    flows_.hand_over(flow, offset, data);
  }
  return used;
}

void LinkReceiver::begin_frame(const std::byte* head) {
  if (!check_.accept_head(head))
    connection_.fail_damaged("the header of a frame from it is not as it was sent (CRC32C)");
  FrameHeader header;
  try {
    header = FrameHeader::decode(std::span<const std::byte, kFrameHeaderBytes>(head, kFrameHeaderBytes));
  } catch (const Error& error) {
    connection_.fail(ErrorKind::kPeerLost, error.what(), "run the same version of ringdp on all ranks");
  }
  sender_.window().credited(header.credit);
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

void LinkReceiver::begin_data(const FrameHeader& header) {
  RecvFlow* flow = flows_.find(header.group, header.sequence);
  if (flow != nullptr && flows_.accept(*flow, header)) {
    target_ = {};
    target_flow_ = flow;
    if (flow->record != nullptr && header.length > kStageBytes) flow->record->note_begin();
    if (connection_.direct() != nullptr || header.length == 0) return;
    target_ = flow->handler->incoming(*flow, header.offset, header.length);
    if (target_.size() != header.length)
      connection_.fail(ErrorKind::kPeerLost, "it sent a segment that crosses a block's end",
                       "report this as a bug of ringdp");
    return;
  }
  dropping_ = flow != nullptr || !flows_.keeps(header);
  spare_.resize(header.length);
  target_ = spare_;
}

void LinkReceiver::finish_payload() {
  const FrameHeader header = *current_;
  if (!check_.payload_is_whole())
    connection_.fail_damaged("the " + std::to_string(header.length) +
                             " bytes of a frame from it are not as they were sent (CRC32C)");
  ++frames_;
  sender_.note_received();
  current_.reset();
  std::span<std::byte> filled = std::exchange(target_, {});
  target_filled_ = 0;
  RecvFlow* flow = std::exchange(target_flow_, nullptr);
  if (header.type != FrameType::kData) return finish_control(header, filled);
  if (flow != nullptr) {
    flows_.advance(*flow, filled.size(), true);
    flows_.consume(header);
    FlowRecord* const record = flow->work_record(filled.size());
    flow->handler->arrived(*flow, header.offset, filled);
    if (record != nullptr) record->note_work(record->last_ns.load(std::memory_order_relaxed));
  } else if (dropping_) {
    flows_.consume(header);
  } else {
    flows_.keep(header, spare_);
  }
}

void LinkReceiver::finish_control(const FrameHeader& header, std::span<const std::byte> payload) {
  const int peer = connection_.peer().rank;
  switch (header.type) {
    case FrameType::kData:
      break;
    case FrameType::kCredit:
      if (header.offset == kByeRead && sender_.said_bye()) connection_.depart();
      break;
    case FrameType::kGrant:
      flows_.on_grant(header);
      break;
    case FrameType::kRequest:
      flows_.on_request(header);
      break;
    case FrameType::kAbort:
      events_.aborted(peer, header.group, AbortNotice::decode(payload));
      break;
    case FrameType::kBye:
      sender_.answer_bye();
      connection_.depart();
      events_.departed(peer, clean_text(text_of(payload), kReasonBytes));
      break;
    case FrameType::kPing:
      events_.asked(peer, header.group, header.sequence, header.offset == kWithStacks);
      break;
    case FrameType::kPong:
      if (header.offset != kWithStacks)
        events_.answered(peer, header.group, header.sequence, PeerState::decode(payload));
      else if (events_.on_stacks)
        events_.on_stacks(peer, header.group, header.sequence, std::string(text_of(payload)));
      break;
  }
}

namespace {

constexpr std::size_t kDrainBytes = 1024 * 1024;  // at a time

bool has_more(const Channel& channel) {
  pollfd polled{channel.poll_fd(), POLLIN, 0};
  return poll(&polled, 1, 0) > 0;
}

}  // namespace

void LinkRepair::stop_sending() {
  hold();
  connection_.channel().close_send();
}

void LinkRepair::drain() {
  while (connection_.connected() && connection_.usable() && has_more(connection_.channel())) {
    if (!receiver_.pump(kDrainBytes)) return;
  }
}

void LinkRepair::interrupt() {
  connection_.interrupt();
  receiver_.interrupted();
  sender_.interrupted();
}

bool LinkRepair::resume(std::unique_ptr<Channel> channel, uint64_t taken) {
  connection_.open(std::move(channel), connection_.made_late());
  return sender_.resumed(taken);
}

void LinkRepair::add_stream(Fd socket) {
  if (connection_.path() != nullptr && connection_.usable() && !connection_.healing())
    connection_.path()->add_stream(std::move(socket));
}

namespace {

constexpr std::size_t kLastFramesBytes = 1024 * 1024;  // read at a time

}  // namespace

Link::Link(PeerInfo self, PeerInfo peer, std::unique_ptr<Channel> channel, const LinkEvents& events, bool checksums,
           std::size_t segment_bytes, bool heals)
    : Connection(std::move(self), std::move(peer)),
      events_(events),
      sender_(
          *this,
          {[this] { events_.wanted(this->peer().rank); }, [this](int error_number) { on_send_failed(error_number); }},
          segment_bytes, heals),
      incoming_(*this, sender_, events_),
      receiver_(*this, sender_, incoming_, events_),
      repair_(*this, sender_, receiver_, heals) {
  if (!channel) return;
  open(std::move(channel), false);
  sender_.opened(checksums);
  receiver_.opened(checksums);
}

void Link::connect(std::unique_ptr<Channel> channel, bool checksums) {
  open(std::move(channel), true);
  receiver_.opened(checksums);
  sender_.opened(checksums);
}

void Link::detach(RecvFlow& flow) {
  incoming_.detach(flow);
  receiver_.detach(flow);
}

void Link::discard_group(uint64_t group) {
  incoming_.discard_group(group);
  sender_.window().discard_group(group);
}

void Link::announce(const FlowIdentity& identity) {
  if (broken() || departed()) return;
  FrameHeader header;
  header.group = identity.group;
  header.sequence = identity.sequence;
  header.fingerprint = identity.fingerprint;
  header.shape = identity.shape;
  sender_.control(header);
}

void Link::send_abort(uint64_t group, const AbortNotice& notice) {
  if (!broken() && !departed())
    sender_.control(FrameHeader::of(FrameType::kAbort, group, notice.sequence), notice.encode());
}

void Link::send_bye(const std::string& reason) {
  if ((connected() || healing()) && !broken() && !departed()) sender_.say_bye(clean_text(reason, kReasonBytes));
}

void Link::send_ping(uint64_t group, uint64_t sequence, bool with_stacks) {
  if (!broken() && !departed() && sender_.may_talk())
    sender_.control(FrameHeader::of(FrameType::kPing, group, sequence, with_stacks ? kWithStacks : 0));
}

void Link::send_pong(uint64_t group, uint64_t sequence, const std::string& answer, bool stacks) {
  if (!broken() && !departed() && sender_.may_talk())
    sender_.control(FrameHeader::of(FrameType::kPong, group, sequence, stacks ? kWithStacks : 0), answer);
}

// If the peer has ended, its last frames explain why. If it still sends, the bytes that this kernel acknowledges must
// be read.
void Link::on_send_failed(int error_number) {
  if (direct() == nullptr) repair_.drain();
  while (!departed() && receiver_.pump(kLastFramesBytes)) {
  }
  if (departed()) return;
  try {
    receiver_.on_closed(error_number);
  } catch (const ConnectionBroken& error) {
    throw error.for_sending();
  }
}

}  // namespace ringdp
