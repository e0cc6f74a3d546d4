// EarlyFrames: frames that a peer has sent for operations that have not started here, with at most the eager window of
// payload, and its requests for grants. Owned by a LinkReceiver; used by the thread that drives the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "mesh/frame.h"

namespace ringdp {

inline constexpr std::size_t kMaxEarlyOperations = 65536;  // how many operations a peer may be ahead

class EarlyFrames {
 public:
  struct Frame {
    FrameHeader header;
    std::vector<std::byte> payload;
  };
  struct Kept {  // of one operation
    bool requested = false;
    std::vector<Frame> frames;
  };

  bool has(uint64_t group, uint64_t sequence) const { return kept_.contains({group, sequence}); }
  bool fits(std::size_t payload) const { return bytes_ + payload <= kEagerWindowBytes && !full(); }

  // False: it is the operation's second frame without payload. Those use up no window, so an operation may have only
  // one: it announces the peer, or is the whole payload.
  bool keep(const FrameHeader& header, std::vector<std::byte> payload);
  bool request(uint64_t group, uint64_t sequence);  // false: there are too many operations

  std::optional<Kept> take(uint64_t group, uint64_t sequence);
  std::vector<FrameHeader> discard(uint64_t group);  // returns the headers of the discarded frames

  // The memory of a payload that was taken is used for the next one that is kept.
  void give_back(std::vector<std::byte> payload) { spare_ = std::move(payload); }
  std::vector<std::byte> spare() { return std::exchange(spare_, {}); }

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // group, sequence

  bool full() const { return kept_.size() >= kMaxEarlyOperations; }

  std::map<Key, Kept> kept_;
  std::size_t bytes_ = 0;  // of payload
  std::vector<std::byte> spare_;
};

}  // namespace ringdp
