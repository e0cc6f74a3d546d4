// ChannelWatch: polls the channels to the peers for bytes, bells, and room in full ones. Its tokens are the peers'
// places in the world. Owned by PeerLinks, used by it on the thread that drives the engine.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "link/link.h"
#include "transport/channel.h"
#include "transport/poller.h"

namespace ringdp {

class ChannelWatch {
 public:
  ChannelWatch(Poller& poller, std::size_t peers) : poller_(poller), writing_(peers, 0) {}

  void add(const Channel& channel, int peer);
  void remove(const Channel& channel);
  // `links` by place in the world: from now on polls exactly the full ones for room to write.
  void follow(std::span<const std::unique_ptr<Link>> links);
  const std::vector<Poller::Event>& look() { return poller_.wait(0); }  // without sleeping

 private:
  Poller& poller_;
  std::vector<char> writing_;  // by peer: watched for room to write
};

}  // namespace ringdp
