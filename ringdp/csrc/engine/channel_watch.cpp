#include "engine/channel_watch.h"

#include <cstdint>

namespace ringdp {

void ChannelWatch::add(const Channel& channel, int peer) {
  writing_[static_cast<std::size_t>(peer)] = 0;
  poller_.add(channel.poll_fd(), static_cast<uint32_t>(peer));
  if (int bell = channel.bell_fd(); bell >= 0) poller_.add_bell(bell, static_cast<uint32_t>(peer));
}

void ChannelWatch::remove(const Channel& channel) {
  poller_.remove(channel.poll_fd());
  if (channel.bell_fd() >= 0) poller_.remove(channel.bell_fd());
}

void ChannelWatch::follow(std::span<const std::unique_ptr<Link>> links) {
  for (const auto& link : links) {
    if (!link || link->direct() || !link->connected() || link->departed()) continue;
    int peer = link->peer().rank;
    if (link->wants_write() == static_cast<bool>(writing_[peer])) continue;
    writing_[peer] = link->wants_write();
    poller_.want_write(link->channel().poll_fd(), static_cast<uint32_t>(peer), link->wants_write());
  }
}

}  // namespace ringdp
