// CrowdedLine: how many of a channel's sockets to use. Each keeps some packets in flight however slow the line is; if
// many are lost, fewer sockets carry more. Bookkeeping only, counts and time come in from outside. Owned by the
// StripedChannel.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/deadline.h"

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

}  // namespace ringdp
