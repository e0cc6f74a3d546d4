// ReorderBuffer: the parts of a byte stream that have arrived before the bytes in front of them. Invariant: stretches
// do not overlap, and none ends beyond a limit from the next byte, so the memory is bounded. Used by one thread at a
// time.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace ringdp {

// Walks over the memory of a list of pieces.
class PieceCursor {
 public:
  explicit PieceCursor(std::span<const iovec> pieces);

  std::size_t left() const { return left_; }
  std::size_t done() const { return done_; }
  // The next bytes, at most so many, as pieces, appended.
  void list(std::size_t bytes, std::vector<iovec>& out) const;
  void skip(std::size_t bytes);
  void copy_in(std::span<const std::byte> bytes);  // they fit

 private:
  std::span<const iovec> pieces_;
  std::size_t offset_ = 0;  // in the first one
  std::size_t left_ = 0;
  std::size_t done_ = 0;
};

class ReorderBuffer {
 public:
  explicit ReorderBuffer(std::size_t reach) : reach_(reach) {}

  uint64_t next() const { return next_; }              // the place of the byte whose turn it is
  void advance(std::size_t bytes) { next_ += bytes; }  // they were read without this buffer
  bool reaches(uint64_t end) const { return end <= next_ + reach_; }
  // False: a byte of it is here already, or was delivered.
  bool keep(uint64_t offset, std::vector<std::byte> bytes);
  void deliver(PieceCursor& to);  // copies the bytes that are next
  bool ready() const { return !waiting_.empty() && waiting_.begin()->first <= next_; }
  std::size_t bytes() const { return bytes_; }

 private:
  const std::size_t reach_;
  uint64_t next_ = 0;
  std::size_t bytes_ = 0;
  // by position; the beginning of the first may have been delivered
  std::map<uint64_t, std::vector<std::byte>> waiting_;
};

}  // namespace ringdp
