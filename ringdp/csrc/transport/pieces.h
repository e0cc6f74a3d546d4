// The first bytes of a list of pieces, for channels that send less than they are offered. Any thread.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace ringdp {

inline std::vector<iovec> first_bytes(std::span<const iovec> pieces, std::size_t bytes) {
  std::vector<iovec> out;
  for (iovec piece : pieces) {
    piece.iov_len = std::min(piece.iov_len, bytes);
    bytes -= piece.iov_len;
    if (piece.iov_len > 0) out.push_back(piece);
  }
  return out;
}

}  // namespace ringdp
