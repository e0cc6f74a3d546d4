// The two halves of one socket of a StripedChannel. StripeSender: sends whole stripes, one after the other, and keeps
// the rest of one for which the socket has no room. StripeReceiver: reads stripes, into the caller's memory if they
// are next in the stream, else into the channel's ReorderBuffer. Owned and used by the StripedChannel, which also owns
// the socket's Channel.
//
// Stripe: a piece of a byte stream on one of several sockets (striped.h): a header of 16 bytes with its position in
// the stream, then its bytes. A stripe of length 0 marks the end of the stream. Value types, any thread.
//
// ReorderBuffer: the parts of a byte stream that have arrived before the bytes in front of them. Invariant: stretches
// do not overlap, and none ends beyond a limit from the next byte, so the memory is bounded. Used by one thread at a
// time.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "transport/channel.h"

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

struct Stripe {
  static constexpr std::size_t kHeadBytes = 16;
  static constexpr std::size_t kMostBytes = 64 * 1024;  // a longer one is not a stripe

  uint64_t offset = 0;
  uint32_t length = 0;

  uint64_t end() const { return offset + length; }

  void encode(std::byte* at) const {
    put(at, offset);
    put(at + 8, length);
    put(at + kCheckAt, check_of({at, kCheckAt}));
  }

  // nullopt: these bytes are not the header of a stripe.
  static std::optional<Stripe> decode(std::span<const std::byte, kHeadBytes> head) {
    if (take<uint32_t>(head.data() + kCheckAt) != check_of(head.first(kCheckAt))) return std::nullopt;
    const Stripe out{take<uint64_t>(head.data()), take<uint32_t>(head.data() + 8)};
    return out.length <= kMostBytes && out.offset < kNoEnd ? std::optional(out) : std::nullopt;
  }

 private:
  static constexpr std::size_t kCheckAt = 12;
  static constexpr uint64_t kNoEnd = uint64_t{1} << 62;

  // A check of the header, which the checksums of frames do not cover: a corrupted position would misplace bytes.
  static uint32_t check_of(std::span<const std::byte> bytes) { return static_cast<uint32_t>(hash_bytes(bytes)); }
};

class StripeSender {
 public:
  explicit StripeSender(Channel& socket) : socket_(socket) {}  // which has a path

  bool has_room() const { return !full_; }  // at the last send
  bool flushed() const { return rest_.empty(); }

  // Takes the next `length` bytes of `from` as the stripe at `offset`. kOk: all of them, kWouldBlock: none.
  IoResult put(uint64_t offset, std::size_t length, const PieceCursor& from);
  IoResult flush();                  // sends the rest. kWouldBlock: there is not enough room
  IoResult finish(uint64_t offset);  // marks the end of the stream; no `put` may follow

  // The position of the first stripe that may not have reached the peer's channel whole; nullopt: all have.
  std::optional<uint64_t> undelivered_from();
  // The peer's host acknowledges bytes on a socket that its channel does not have yet, and would not read them if the
  // connection broke now: none counts as delivered until a byte comes back on the socket.
  void doubt() { doubted_ = true; }
  void trust() { doubted_ = false; }

 private:
  static constexpr std::size_t kLeastPut = 256;

  struct Put {
    uint64_t offset;  // of a stripe, in the stream
    uint64_t end;     // of it, in the bytes of this socket
  };

  IoResult send_rest();

  Channel& socket_;
  std::deque<Put> put_;  // not known to be delivered
  std::size_t most_put_ = kLeastPut;
  uint64_t carried_ = 0;         // bytes
  std::vector<std::byte> rest_;  // the unsent rest of a stripe
  std::size_t rest_sent_ = 0;
  std::vector<iovec> pieces_;
  bool full_ = false;
  bool finishing_ = false;
  bool doubted_ = false;
};

class StripeReceiver {
 public:
  explicit StripeReceiver(Channel& socket) : socket_(socket) {}

  // Reads the socket. Bytes that are next in the stream go to `to`; stops when that is full.
  void pull(ReorderBuffer& buffer, PieceCursor& to);
  bool has_begun() const { return begun_; }  // a byte has come

  // The next stripe is beyond the buffer's limit: it stays in the kernel.
  bool stalled(const ReorderBuffer& buffer) const {
    return stripe_ && block_.empty() && filled_ == 0 && !buffer.reaches(stripe_->end());
  }
  bool ended() const { return ended_; }
  int error_number() const { return error_number_; }                  // of the socket's failure
  std::optional<uint64_t> stream_end() const { return stream_end_; }  // if the final stripe has come

 private:
  bool read_head(ReorderBuffer& buffer);
  bool read_payload(ReorderBuffer& buffer, PieceCursor& to);
  IoResult read(std::vector<iovec>& pieces);
  void end(int error_number);

  Channel& socket_;
  std::array<std::byte, Stripe::kHeadBytes> head_{};
  std::size_t head_filled_ = 0;
  std::optional<Stripe> stripe_;  // the one being received
  std::size_t filled_ = 0;
  std::vector<std::byte> block_;  // their memory, unless they are next
  std::vector<iovec> pieces_;
  uint64_t least_ = 0;  // where the next stripe begins at the earliest
  bool begun_ = false;
  bool ended_ = false;
  int error_number_ = 0;
  std::optional<uint64_t> stream_end_;
};

}  // namespace ringdp
