// ResendQueue: the frames that were sent on one connection and may not have arrived. After the connection has broken,
// the peer says how many frames it has, and the rest is sent again on the next one. A payload is not copied as long as
// the memory of its operation does not change; small ones are. Frames that the peer's host has acknowledged are
// dropped: the peer reads them, even if the connection has broken, before it says how many it has. Owned by a
// LinkSender, used by it on the thread that drives the engine.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "link/flow.h"
#include "link/frame.h"

namespace ringdp {

class ResendQueue {
 public:
  // A frame that will be sent after all before it. `lender`: the payload is in the memory of that flow's operation;
  // null: it is copied.
  void add(std::span<const std::byte> head, std::span<const std::byte> payload, const SendFlow* lender);

  // Payloads up to this are copied at once, which costs less than a system call.
  static constexpr std::size_t kCopiedBytes = 8 * 1024;

  bool lends_any() const { return lent_ > 0; }
  // Copies the payloads in this memory, or all of the flow's: the memory will change or be freed.
  void take_over(const SendFlow& flow, std::span<const std::byte> memory);
  bool should_forget() const;             // so much was added that some of it has surely arrived
  void forget(uint64_t delivered_bytes);  // so many bytes of this connection's stream have arrived
  std::size_t size() const { return kept_.size(); }

  // A new connection, to a peer that has so many frames; false: one that it lacks was dropped.
  bool rewind(uint64_t taken);

  // True until all frames from before the rewind are sent.
  bool rewound() const { return again_ < again_end_; }
  std::size_t pieces(std::array<iovec, 3>& out) const;  // the unsent parts of the next frame; their number
  void sent(std::size_t bytes);                         // of those pieces

 private:
  struct Kept {
    std::array<std::byte, kFrameHeaderBytes + kFrameCheckBytes> head;
    std::size_t head_bytes;
    std::span<const std::byte> payload;
    std::vector<std::byte> own;  // where `payload` is a copy
    const SendFlow* lender;      // only to be compared
    uint64_t end;                // in the stream of this connection

    std::size_t bytes() const { return head_bytes + payload.size(); }
  };

  void copy_payload(Kept& it);
  void drop_first();
  const Kept& at(uint64_t number) const { return kept_[static_cast<std::size_t>(number - first_)]; }

  std::deque<Kept> kept_;
  // Memory of copies that are forgotten, for the next ones: fresh memory costs as many page faults as the copy.
  std::vector<std::vector<std::byte>> spare_;
  std::size_t spare_bytes_ = 0;
  uint64_t first_ = 0;      // number of kept_.front(): frames before it, on all connections
  uint64_t stream_ = 0;     // bytes of this connection up to the last frame's end
  std::size_t lent_ = 0;    // frames
  uint64_t looked_at_ = 0;  // `stream_` at the last call of `forget`
  std::size_t looked_size_ = 0;
  uint64_t again_ = 0;  // number of the frame that goes next
  uint64_t again_end_ = 0;
  std::size_t again_sent_ = 0;  // bytes of it
};

}  // namespace ringdp
