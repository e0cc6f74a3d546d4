// StripedChannel: one channel over several sockets to the same peer. A long path loses a packet now and then; each
// loss makes one socket slow for a while, and a single one is slow most of the time. The stream is cut into stripes
// (stripe.h), and the next socket with room sends the next one; the receiver puts them back in order in bounded
// memory.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "transport/channel.h"

namespace ringdp {

inline constexpr int kMostStreams = 32;
// the most that is buffered while a stripe is missing
inline constexpr std::size_t kReorderBytes = std::size_t{16} << 20;

// `sockets`: the channels over them, at least one, none of them direct; in the same number at the other end, in any
// order.
std::unique_ptr<Channel> make_striped_channel(std::vector<std::unique_ptr<Channel>> sockets,
                                              std::size_t reorder_bytes = kReorderBytes);

}  // namespace ringdp
