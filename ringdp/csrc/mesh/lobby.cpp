#include "mesh/lobby.h"

#include <array>

#include "mesh/frame.h"

namespace ringdp {

std::vector<std::string> Lobby::hellos() const {
  std::vector<std::string> out;
  for (const MetPeer& peer : peers_) out.push_back(peer.hello);
  return out;
}

std::vector<MetPeer> Lobby::take() {
  if (taken_) throw Error(ErrorKind::kState, "the connections of this meeting are in use already");
  taken_ = true;
  std::vector<MetPeer> out;
  for (MetPeer& peer : peers_)
    out.push_back({peer.info, peer.host_identity, peer.hello, std::move(peer.channel), peer.transport});
  return out;
}

void Lobby::close() {
  std::array<std::byte, kFrameHeaderBytes> bye{};
  FrameHeader header;
  header.type = FrameType::kBye;
  header.encode(bye);
  iovec piece{bye.data(), bye.size()};
  for (MetPeer& peer : peers_) {
    if (peer.channel) peer.channel->send({&piece, 1});  // the first words on it: there is room, or nobody listens
    peer.channel.reset();
  }
}

}  // namespace ringdp
