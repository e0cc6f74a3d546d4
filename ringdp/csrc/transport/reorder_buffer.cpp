#include "transport/reorder_buffer.h"

#include <algorithm>
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

}  // namespace ringdp
