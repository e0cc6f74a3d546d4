#include "transport/stripe_lane.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

namespace ringdp {

PieceCursor::PieceCursor(std::span<const iovec> pieces) : pieces_(pieces) {
  for (const iovec& it : pieces) left_ += it.iov_len;
}

void PieceCursor::list(std::size_t bytes, std::vector<iovec>& out) const {
  std::size_t offset = offset_;
  for (auto it = pieces_.begin(); it != pieces_.end() && bytes > 0; ++it, offset = 0) {
    const std::size_t part = std::min(bytes, it->iov_len - offset);
    if (part > 0) out.push_back({static_cast<std::byte*>(it->iov_base) + offset, part});
    bytes -= part;
  }
}

void PieceCursor::skip(std::size_t bytes) {
  left_ -= bytes;
  done_ += bytes;
  for (offset_ += bytes; !pieces_.empty() && offset_ >= pieces_.front().iov_len; pieces_ = pieces_.subspan(1))
    offset_ -= pieces_.front().iov_len;
}

void PieceCursor::copy_in(std::span<const std::byte> bytes) {
  std::vector<iovec> to;
  list(bytes.size(), to);
  const std::byte* from = bytes.data();
  for (const iovec& it : to) {
    std::memcpy(it.iov_base, from, it.iov_len);
    from += it.iov_len;
  }
  skip(bytes.size());
}

bool ReorderBuffer::keep(uint64_t offset, std::vector<std::byte> bytes) {
  const auto after = waiting_.lower_bound(offset);
  const bool meets_next = after != waiting_.end() && after->first < offset + bytes.size();
  const bool meets_last =
      after != waiting_.begin() && std::prev(after)->first + std::prev(after)->second.size() > offset;
  if (bytes.empty() || offset < next_ || meets_next || meets_last) return false;
  bytes_ += bytes.size();
  waiting_.emplace_hint(after, offset, std::move(bytes));
  return true;
}

void ReorderBuffer::deliver(PieceCursor& to) {
  while (to.left() > 0 && ready()) {
    const auto first = waiting_.begin();
    const std::size_t taken = next_ - first->first;
    const std::size_t part = std::min(to.left(), first->second.size() - taken);
    to.copy_in(std::span(first->second).subspan(taken, part));
    next_ += part;
    if (taken + part < first->second.size()) return;
    bytes_ -= first->second.size();
    waiting_.erase(first);
  }
}

IoResult StripeSender::put(uint64_t offset, std::size_t length, const PieceCursor& from) {
  std::array<std::byte, Stripe::kHeadBytes> head;
  Stripe{offset, static_cast<uint32_t>(length)}.encode(head.data());
  pieces_.assign({{head.data(), head.size()}});
  from.list(length, pieces_);
  const IoResult result = socket_.send(pieces_);
  if (result.status != IoStatus::kOk) {
    full_ = result.status == IoStatus::kWouldBlock;
    return result;
  }
  std::size_t sent = result.bytes;
  for (const iovec& it : pieces_) {
    const std::size_t done = std::min(sent, it.iov_len);
    const auto* bytes = static_cast<const std::byte*>(it.iov_base);
    rest_.insert(rest_.end(), bytes + done, bytes + it.iov_len);
    sent -= done;
  }
  if (!rest_.empty()) send_rest();  // a second try: from then on the kernel reports room. The next call returns errors
  put_.push_back({offset, carried_ += Stripe::kHeadBytes + length});
  if (put_.size() >= most_put_) {
    undelivered_from();
    most_put_ = std::max(kLeastPut, 2 * put_.size());
  }
  return {IoStatus::kOk, length, 0};
}

std::optional<uint64_t> StripeSender::undelivered_from() {
  if (doubted_) return put_.empty() ? std::nullopt : std::optional(put_.front().offset);
  const std::size_t waits = rest_.size() - rest_sent_;
  const std::size_t under_way = socket_.path()->undelivered();
  const uint64_t delivered = under_way <= carried_ && waits <= carried_ - under_way ? carried_ - under_way - waits : 0;
  while (!put_.empty() && put_.front().end <= delivered) put_.pop_front();
  return put_.empty() ? std::nullopt : std::optional(put_.front().offset);
}

IoResult StripeSender::flush() {
  full_ = false;
  return rest_.empty() ? IoResult{} : send_rest();
}

IoResult StripeSender::finish(uint64_t offset) {
  if (finishing_) return {};
  finishing_ = true;
  rest_.resize(rest_.size() + Stripe::kHeadBytes);
  Stripe{offset, 0}.encode(rest_.data() + rest_.size() - Stripe::kHeadBytes);
  return send_rest();
}

IoResult StripeSender::send_rest() {
  while (rest_sent_ < rest_.size()) {
    const iovec piece{rest_.data() + rest_sent_, rest_.size() - rest_sent_};
    const IoResult result = socket_.send(std::span(&piece, 1));
    full_ = result.status == IoStatus::kWouldBlock;
    if (result.status != IoStatus::kOk) return result;
    rest_sent_ += result.bytes;
  }
  rest_.clear();
  rest_sent_ = 0;
  if (finishing_) socket_.close_send();
  return {};
}

void StripeReceiver::pull(ReorderBuffer& buffer, PieceCursor& to) {
  while (!ended_ && (stripe_ ? read_payload(buffer, to) : read_head(buffer))) {
  }
}

void StripeReceiver::end(int error_number) {
  ended_ = true;
  error_number_ = error_number;
}

IoResult StripeReceiver::read(std::vector<iovec>& pieces) {
  const IoResult result = socket_.receive(pieces);
  begun_ |= result.status == IoStatus::kOk;
  if (result.status == IoStatus::kClosed) end(0);
  if (result.status == IoStatus::kBroken) end(result.error_number);
  return result;
}

// False: it needs more from the socket.
bool StripeReceiver::read_head(ReorderBuffer& buffer) {
  if (head_filled_ < head_.size()) {
    pieces_.assign({{head_.data() + head_filled_, head_.size() - head_filled_}});
    const IoResult result = read(pieces_);
    if (result.status != IoStatus::kOk) return false;
    head_filled_ += result.bytes;
    if (head_filled_ < head_.size()) return false;
  }
  head_filled_ = 0;
  const auto stripe = Stripe::decode(head_);
  if (!stripe || stripe->offset < std::max(least_, buffer.next()) || stream_end_) {
    end(EBADMSG);
    return false;
  }
  least_ = stripe->end();
  if (stripe->length == 0)
    stream_end_ = stripe->offset;
  else
    stripe_ = stripe;
  return true;
}

bool StripeReceiver::read_payload(ReorderBuffer& buffer, PieceCursor& to) {
  std::size_t left = stripe_->length - filled_;
  const bool direct = block_.empty() && stripe_->offset + filled_ == buffer.next();
  pieces_.clear();
  if (direct) {
    if (to.left() == 0) return false;
    left = std::min(left, to.left());
    to.list(left, pieces_);
  } else {
    if (stalled(buffer)) return false;
    block_.resize(stripe_->length);
    pieces_.push_back({block_.data() + filled_, left});
  }
  const bool to_its_end = filled_ + left == stripe_->length;
  if (to_its_end) pieces_.push_back({head_.data(), head_.size()});  // of the next one, for one system call less
  const IoResult result = read(pieces_);
  if (result.status != IoStatus::kOk) return false;
  const std::size_t got = std::min(left, result.bytes);
  head_filled_ = result.bytes - got;
  filled_ += got;
  if (direct) {
    to.skip(got);
    buffer.advance(got);
  }
  if (filled_ < stripe_->length) return got == left;
  if (!block_.empty() && !buffer.keep(stripe_->offset, std::exchange(block_, {}))) end(EBADMSG);
  stripe_.reset();
  filled_ = 0;
  buffer.deliver(to);
  return !ended_;
}

}  // namespace ringdp
