// How a Link reads a direct channel: frames where they lie in the transport's memory.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "mesh/link.h"

namespace ringdp {
namespace {

constexpr std::size_t kDirectStretchBytes = 64 * 1024;  // used up between two words to the sender that there is room

}  // namespace

bool Link::pump_direct(std::size_t budget_bytes) {
  std::size_t moved = 0;
  while (!broken_ && !departed_ && moved < budget_bytes) {
    std::span<const std::byte> bytes;
    IoStatus status = channel_->peek(bytes);
    if (status == IoStatus::kWouldBlock) break;
    if (status != IoStatus::kOk) {
      on_closed(status == IoStatus::kClosed ? 0 : EPROTO);
      break;
    }
    std::size_t used = take_direct(bytes);
    if (used == 0) break;
    moved += used;
    bytes_received_.fetch_add(used, std::memory_order_relaxed);
    channel_->consume(used);
  }
  return moved > 0;
}

// Frames, or parts of one, straight out of the transport's memory; a stretch at a time, so that its room is soon free.
std::size_t Link::take_direct(std::span<const std::byte> bytes) {
  std::size_t used = 0;
  while (used < kDirectStretchBytes && !departed_) {
    std::size_t rest = bytes.size() - used;
    if (!current_) {
      if (rest < kFrameHeaderBytes) break;
      FrameHeader header = read_header(bytes.data() + used);
      used += kFrameHeaderBytes;
      eager_credited_ = header.credit;
      begin_frame(header);
      continue;
    }
    const FrameHeader& header = *current_;
    std::size_t length = header.length, whole = length + padding_of(length);
    std::size_t part = std::min({rest, whole - target_filled_, kDirectStretchBytes});
    if (part < whole - target_filled_) part -= part % Channel::kDirectAlignment;
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
    flow.received += payload;
    if (last) {
      flow.opened = true;
      if (flow.complete()) std::erase(receiving_, &flow);
      consume(header);
      current_.reset();
      target_flow_ = nullptr;
    }
    hand_over(flow, offset, data);
  }
  return used;
}

}  // namespace ringdp
