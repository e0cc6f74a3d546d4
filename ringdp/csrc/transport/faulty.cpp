#include "transport/faulty.h"

#include <algorithm>
#include <vector>

namespace ringdp {
namespace {

std::vector<iovec> first_bytes(std::span<const iovec> pieces, std::size_t bytes) {
  std::vector<iovec> out;
  for (iovec piece : pieces) {
    piece.iov_len = std::min(piece.iov_len, bytes);
    bytes -= piece.iov_len;
    if (piece.iov_len > 0) out.push_back(piece);
  }
  return out;
}

}  // namespace

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
