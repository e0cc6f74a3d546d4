// StripedChannel: one channel over several sockets to the same peer. A long path loses a packet now and then; each
// loss makes one socket slow for a while, and a single one is slow most of the time. The stream is cut into stripes
// (stripe.h), and the next socket with room sends the next one; the receiver puts them back in order in bounded
// memory.
//
// CrowdedLine: how many of a channel's sockets to use. Each keeps some packets in flight however slow the line is; if
// many are lost, fewer sockets carry more. Bookkeeping only, counts and time come in from outside. Owned by the
// StripedChannel.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "transport/channel.h"

namespace ringdp {

class CrowdedLine {
 public:
  static constexpr auto kLookEvery = std::chrono::milliseconds(500);
  static constexpr auto kMoreAgainAfter = std::chrono::seconds(60);
  static constexpr uint64_t kCrowded = 3;  // the line is crowded if one packet of so many is lost
  static constexpr uint64_t kEnoughPackets = 60;

  std::size_t in_use(std::size_t sockets) const { return std::max<std::size_t>(sockets >> halved_, 1); }

  bool wants_look(Clock::time_point now) const { return now - looked_at_ >= kLookEvery; }
  // So far, of all `sockets` together.
  void look(uint64_t packets, uint64_t lost, std::size_t sockets, Clock::time_point now) {
    looked_at_ = now;
    if (packets - packets_ < kEnoughPackets) return;
    const uint64_t sent = packets - std::exchange(packets_, packets), again = lost - std::exchange(lost_, lost);
    const bool crowded = again * kCrowded > sent;
    if (crowded && in_use(sockets) > 1) ++halved_;
    if (!crowded && halved_ > 0 && now - changed_at_ > kMoreAgainAfter) {
      --halved_;
      changed_at_ = now;
    }
    if (crowded) changed_at_ = now;
  }

 private:
  std::size_t halved_ = 0;  // times
  uint64_t packets_ = 0, lost_ = 0;
  Clock::time_point looked_at_{}, changed_at_{};
};

inline constexpr int kMostStreams = 32;
// the most that is buffered while a stripe is missing
inline constexpr std::size_t kReorderBytes = std::size_t{16} << 20;

// `sockets`: the channels over them, at least one, each with a path; in the same number at the other end, in any
// order.
std::unique_ptr<Channel> make_striped_channel(std::vector<std::unique_ptr<Channel>> sockets,
                                              std::size_t reorder_bytes = kReorderBytes);

}  // namespace ringdp
