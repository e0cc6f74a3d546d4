#include "mesh/pending_mesh.h"

#include <array>
#include <utility>

#include "base/text.h"
#include "mesh/connection_thread.h"
#include "mesh/frame_check.h"

namespace ringdp {

PendingMesh::PendingMesh(Store& store, const RendezvousOptions& options)
    : rank_(options.rank), mesh_(meet(store, options)) {
  for (const MeshPeer& peer : mesh_.peers) hellos_.push_back(peer.hello);
}

Mesh PendingMesh::take() {
  if (taken_) throw Error(ErrorKind::kState, "the connections of this PendingMesh were taken already");
  taken_ = true;
  return std::exchange(mesh_, {});
}

void PendingMesh::close(const std::string& reason) {
  std::string payload = clean_text(reason, kReasonBytes);
  FrameHeader header;
  header.type = FrameType::kBye;
  header.length = static_cast<uint32_t>(payload.size());
  std::array<std::byte, kFrameHeaderBytes + kFrameCheckBytes> head{};
  const std::string padding(Channel::padding_of(payload.size()), '\0');
  mesh_.late.reset();
  for (MeshPeer& peer : mesh_.peers) {
    if (!peer.channel) continue;
    const FrameCheck check(peer.checksums);
    check.write_head(header, std::as_bytes(std::span(payload)), head.data());
    const std::string bytes = peer.channel->direct() ? payload + padding : payload;
    std::array<iovec, 2> pieces{{{head.data(), check.head_bytes()}, {const_cast<char*>(bytes.data()), bytes.size()}}};
    peer.channel->send(pieces);  // the first bytes on it: there is room, unless the peer has ended
    peer.channel.reset();
  }
}

}  // namespace ringdp
