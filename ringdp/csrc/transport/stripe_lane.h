// One socket of a StripedChannel, its two halves. StripeSender: stripes go out whole, one after the other; what the
// socket has no room for is kept and follows when it has. StripeReceiver: stripes come in, straight to where they are
// wanted if it is their turn, else by way of the channel's ReorderBuffer. Owned and used by the StripedChannel, which
// also owns the socket's Channel.
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

  bool has_room() const { return !full_; }  // as far as is known
  bool flushed() const { return rest_.empty(); }

  // Takes the next `length` bytes of `from` as the stripe at `offset`. kOk: all of them, kWouldBlock: none.
  IoResult put(uint64_t offset, std::size_t length, const PieceCursor& from);
  IoResult flush();                  // the socket has room again, or may have. kWouldBlock: not enough
  IoResult finish(uint64_t offset);  // the stream ends there; nothing may be put any more

  // Where in the stream the first stripe begins that may not have come to the peer's channel whole; nullopt: all have.
  std::optional<uint64_t> undelivered_from();
  // The peer's host acknowledges what comes on a socket that its channel does not have yet, and would not read it if
  // the connection broke now: none of it counts as delivered, until something comes back on the socket.
  void doubt() { doubted_ = true; }
  void trust() { doubted_ = false; }

 private:
  static constexpr std::size_t kLeastPut = 256;

  struct Put {
    uint64_t offset;  // of a stripe, in the stream
    uint64_t end;     // of it, in what this socket carries
  };

  IoResult send_rest();

  Channel& socket_;
  std::deque<Put> put_;  // of which it is not known whether they have come
  std::size_t most_put_ = kLeastPut;
  uint64_t carried_ = 0;         // bytes
  std::vector<std::byte> rest_;  // of a stripe that the socket has begun
  std::size_t rest_sent_ = 0;
  std::vector<iovec> pieces_;
  bool full_ = false;
  bool finishing_ = false;
  bool doubted_ = false;
};

class StripeReceiver {
 public:
  explicit StripeReceiver(Channel& socket) : socket_(socket) {}

  // Reads what has come. Bytes whose turn it is go to `to`; it stops where that is full.
  void pull(ReorderBuffer& buffer, PieceCursor& to);
  bool has_begun() const { return begun_; }  // something has come

  // The next stripe is out of the buffer's reach: it waits in the system.
  bool stalled(const ReorderBuffer& buffer) const {
    return stripe_ && block_.empty() && filled_ == 0 && !buffer.reaches(stripe_->end());
  }
  bool ended() const { return ended_; }
  int error_number() const { return error_number_; }                  // that ended it
  std::optional<uint64_t> stream_end() const { return stream_end_; }  // it has come

 private:
  bool read_head(ReorderBuffer& buffer);
  bool read_payload(ReorderBuffer& buffer, PieceCursor& to);
  IoResult read(std::vector<iovec>& pieces);
  void end(int error_number);

  Channel& socket_;
  std::array<std::byte, Stripe::kHeadBytes> head_{};
  std::size_t head_filled_ = 0;
  std::optional<Stripe> stripe_;  // whose bytes come now
  std::size_t filled_ = 0;
  std::vector<std::byte> block_;  // where they go, unless it is their turn
  std::vector<iovec> pieces_;
  uint64_t least_ = 0;  // where the next stripe begins at the earliest
  bool begun_ = false;
  bool ended_ = false;
  int error_number_ = 0;
  std::optional<uint64_t> stream_end_;
};

}  // namespace ringdp
