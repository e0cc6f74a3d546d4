#include "transport/counted.h"

#include <algorithm>
#include <cerrno>

#include "base/bytes.h"
#include "transport/stripe_lane.h"

namespace ringdp {
namespace {

constexpr std::size_t kMostBytes = 128 * 1024;  // of a message with its head
constexpr uint64_t kTellBytes = 128 * 1024;     // received, after which a message of its own tells the peer

}  // namespace

void CountedChannel::begin_message(std::size_t bytes) {
  put(head_out_.data(), received_);
  put(head_out_.data() + 8, static_cast<uint32_t>(bytes));
  told_ = received_;
  head_left_ = kHeadBytes;
  message_left_ = bytes;
}

IoResult CountedChannel::send_on(std::span<const iovec> pieces) {
  parts_.clear();
  if (head_left_ > 0) parts_.push_back({head_out_.data() + kHeadBytes - head_left_, head_left_});
  PieceCursor from(pieces);
  from.list(std::min(message_left_, from.left()), parts_);
  IoResult result = inner_->send(parts_);
  if (result.status != IoStatus::kOk) return result;
  const std::size_t of_head = std::min(result.bytes, head_left_);
  head_left_ -= of_head;
  result.bytes -= of_head;
  message_left_ -= result.bytes;
  sent_ += result.bytes;
  if (result.bytes == 0) result.status = IoStatus::kWouldBlock;  // there was room for the head alone
  return result;
}

IoResult CountedChannel::send(std::span<const iovec> pieces) {
  std::size_t offered = 0;
  for (const iovec& it : pieces) offered += it.iov_len;
  if (offered == 0) return {};
  if (wrong_) return {IoStatus::kBroken, 0, EBADMSG};
  if (message_left_ == 0 && head_left_ > 0) {  // of a message that only tells
    const IoResult result = send_on({});
    if (head_left_ > 0) return result;
  }
  if (message_left_ == 0) begin_message(std::min(offered, kMostBytes - kHeadBytes));
  return send_on(pieces);
}

IoResult CountedChannel::receive(std::span<const iovec> pieces) {
  if (wrong_) return {IoStatus::kBroken, 0, EBADMSG};
  PieceCursor to(pieces);
  IoResult result;
  while (to.left() > 0 && result.status == IoStatus::kOk && !wrong_) {
    // With the next head, if there is room for all that comes before it.
    const std::size_t payload = std::min(payload_left_, to.left());
    parts_.clear();
    to.list(payload, parts_);
    if (payload == payload_left_) parts_.push_back({head_in_.data() + head_filled_, kHeadBytes - head_filled_});
    result = inner_->receive(parts_);
    if (result.status != IoStatus::kOk) break;
    const std::size_t got = std::min(result.bytes, payload);
    to.skip(got);
    payload_left_ -= got;
    received_ += got;
    head_filled_ += result.bytes - got;
    if (head_filled_ == kHeadBytes) take_head();
  }
  if (wrong_ && to.done() == 0) return {IoStatus::kBroken, 0, EBADMSG};
  tell();
  return to.done() > 0 ? IoResult{IoStatus::kOk, to.done(), 0} : result;
}

void CountedChannel::take_head() {
  head_filled_ = 0;
  const auto arrived = ringdp::take<uint64_t>(head_in_.data());
  payload_left_ = ringdp::take<uint32_t>(head_in_.data() + 8);
  wrong_ = arrived < arrived_ || arrived > sent_ || payload_left_ > kMostBytes;
  if (!wrong_) arrived_ = arrived;
}

// The peer may wait for nothing, but keeps what may have to be sent again.
void CountedChannel::tell() {
  if (closing_ || message_left_ > 0) return;
  if (head_left_ == 0) {
    if (received_ - told_ < kTellBytes) return;
    begin_message(0);
  }
  send_on({});
}

void CountedChannel::close_send() {
  closing_ = true;
  inner_->close_send();
}

}  // namespace ringdp
