// PeerTable: the identities of the ranks of the world. Owned by PeerLinks, made once and never changed; any thread.
#pragma once

#include <cstddef>
#include <vector>

#include "meet/rendezvous.h"

namespace ringdp {

class PeerTable {
 public:
  PeerTable(int rank, const std::vector<MeshPeer>& peers) : rank_(rank) {
    for (const MeshPeer& peer : peers) infos_.push_back(peer.info);
  }

  int rank() const { return rank_; }  // of this process
  int world() const { return static_cast<int>(infos_.size()); }
  const PeerInfo& info(int rank) const { return infos_[static_cast<std::size_t>(rank)]; }
  const PeerInfo& self() const { return info(rank_); }

 private:
  const int rank_;
  std::vector<PeerInfo> infos_;  // by place in the world
};

}  // namespace ringdp
