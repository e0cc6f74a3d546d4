#include "meet/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "link/frame.h"
#include "meet/connection_thread.h"
#include "meet/rendezvous_run.h"
#include "shared/ready_tree.h"
#include "transport/pair_memory.h"

namespace ringdp {

std::vector<int> overlay_neighbours(int place, int size) {
  std::set<int> out;
  for (int distance = 1; distance < size; distance *= 2) {
    out.insert((place + distance) % size);
    out.insert((place + size - distance) % size);
  }
  out.erase(place);
  return {out.begin(), out.end()};
}

bool connected_from_start(int a, int b, int world, int full_mesh_ranks) {
  if (a == b) return false;
  if (world <= full_mesh_ranks) return true;
  auto one_way = static_cast<unsigned>(a > b ? a - b : b - a);
  if (std::has_single_bit(one_way) || std::has_single_bit(static_cast<unsigned>(world) - one_way)) return true;
  return ReadyTree::parent_of(a) == b || ReadyTree::parent_of(b) == a;
}

Mesh::Mesh() = default;
Mesh::~Mesh() = default;
Mesh::Mesh(Mesh&&) noexcept = default;
Mesh& Mesh::operator=(Mesh&&) noexcept = default;

Mesh meet(Store& store, const RendezvousOptions& options) {
  if (options.rank < 0 || options.rank >= options.world)
    throw Error(ErrorKind::kValue,
                "rank " + std::to_string(options.rank) + " of " + std::to_string(options.world) + " does not exist");
  std::size_t ring = options.shm_ring_bytes;
  if (ring != 0 && (!std::has_single_bit(ring) || ring < PairMemory::kMinRingBytes || ring > PairMemory::kMaxRingBytes))
    throw Error(ErrorKind::kValue, "shm_ring_bytes must be a power of two from " +
                                       std::to_string(PairMemory::kMinRingBytes) + " to " +
                                       std::to_string(PairMemory::kMaxRingBytes) + ", not " + std::to_string(ring));
  if (options.world == 1) {
    Mesh alone;
    alone.peers.resize(1);
    MeshPeer& self = alone.peers[0];
    self.info = {0, options.host_name.empty() ? host_name() : options.host_name, getpid()};
    self.host_identity = host_identity(options.host_id);
    self.site = options.site;
    self.hello = options.hello;
    return alone;
  }
  RendezvousRun rendezvous(store, options);
  try {
    // Publishes the failure before the sockets close: a rank that sees one close finds the reason in the store.
    try {
      return rendezvous.run();
    } catch (const StoreLost&) {
      throw;
    } catch (const Error& error) {
      throw rendezvous.agree_on_error(error, false);
    } catch (const std::exception& error) {  // of check_interrupt: a signal's handler raised it
      std::string what = error.what();
      what = what.substr(0, what.find('\n'));
      Error stopped(ErrorKind::kInterrupted, "was stopped while the ranks met, by " + what);
      rendezvous.agree_on_error(stopped, true);
      throw;
    }
  } catch (const StoreLost& error) {
    throw rendezvous.store_lost(error);
  }
}

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
  const std::string padding(DirectReader::padding_of(payload.size()), '\0');
  mesh_.late.reset();
  for (MeshPeer& peer : mesh_.peers) {
    if (!peer.channel) continue;
    const FrameCheck check(peer.checksums);
    check.write_head(header, std::as_bytes(std::span(payload)), head.data());
    const std::string bytes = peer.channel->direct() != nullptr ? payload + padding : payload;
    std::array<iovec, 2> pieces{{{head.data(), check.head_bytes()}, {const_cast<char*>(bytes.data()), bytes.size()}}};
    peer.channel->send(pieces);  // the first bytes on it: there is room, unless the peer has ended
    peer.channel.reset();
  }
}

}  // namespace ringdp
