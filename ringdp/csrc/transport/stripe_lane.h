// The two halves of one socket of a StripedChannel. StripeSender: sends whole stripes, one after the other, and keeps
// the rest of one for which the socket has no room. StripeReceiver: reads stripes, into the caller's memory if they
// are next in the stream, else into the channel's ReorderBuffer. Owned and used by the StripedChannel, which also owns
// the socket's Channel.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "transport/channel.h"
#include "transport/reorder_buffer.h"
#include "transport/stripe.h"

namespace ringdp {

class StripeSender {
 public:
  explicit StripeSender(Channel& socket) : socket_(socket) {}

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
