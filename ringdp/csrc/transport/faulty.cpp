#include "transport/faulty.h"

#include <algorithm>

#include "transport/pieces.h"

namespace ringdp {
IoResult FaultyChannel::send(std::span<const iovec> pieces) {
  if (refuses()) return {IoStatus::kWouldBlock};
  return inner_->send(first_bytes(pieces, some()));
}

IoResult FaultyChannel::receive(std::span<const iovec> pieces) {
  if (refuses()) return {IoStatus::kWouldBlock};
  return inner_->receive(first_bytes(pieces, some()));
}

IoStatus FaultyChannel::peek(std::span<const std::byte>& bytes) {
  IoStatus status = inner_->peek(bytes);
  if (status != IoStatus::kOk) return status;
  bytes = refuses() ? std::span<const std::byte>{} : bytes.first(std::min(bytes.size(), some()));
  return bytes.empty() ? IoStatus::kWouldBlock : IoStatus::kOk;
}

}  // namespace ringdp
