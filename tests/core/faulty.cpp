#include "faulty.h"

#include <algorithm>

#include "transport/rate_limit.h"

namespace ringdp {
IoResult FaultyChannel::send(std::span<const iovec> pieces) {
  if (refuses()) return {IoStatus::kWouldBlock};
  return inner_->send(first_bytes(pieces, some()));
}

IoResult FaultyChannel::receive(std::span<const iovec> pieces) {
  if (refuses()) return {IoStatus::kWouldBlock};
  IoResult result = inner_->receive(first_bytes(pieces, some()));
  if (flip_bit_ && result.status == IoStatus::kOk) flip(pieces, result.bytes);
  return result;
}

void FaultyChannel::flip(std::span<const iovec> pieces, std::size_t received) {
  uint64_t at = *flip_bit_ / 8;
  if (at >= received) {
    *flip_bit_ -= 8 * received;
    return;
  }
  auto piece = pieces.begin();
  for (; at >= piece->iov_len; ++piece) at -= piece->iov_len;
  static_cast<std::byte*>(piece->iov_base)[at] ^= std::byte{1} << (*flip_bit_ % 8);
  flip_bit_.reset();
}

IoStatus FaultyChannel::peek(std::span<const std::byte>& bytes) {
  IoStatus status = inner_->direct()->peek(bytes);
  if (status != IoStatus::kOk) return status;
  bytes = refuses() ? std::span<const std::byte>{} : bytes.first(std::min(bytes.size(), some()));
  return bytes.empty() ? IoStatus::kWouldBlock : IoStatus::kOk;
}

}  // namespace ringdp
