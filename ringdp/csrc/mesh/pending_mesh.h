// PendingMesh: the connections after the rendezvous, before the ranks choose a backend. Each rank has a short text
// (`hello`) that all others get. Owned by Python (job/process_group.py); made, read and destroyed by one thread.
#pragma once

#include <string>
#include <vector>

#include "mesh/rendezvous.h"

namespace ringdp {

class PendingMesh {
 public:
  PendingMesh(Store& store, const RendezvousOptions& options);
  ~PendingMesh() { close(); }
  PendingMesh(const PendingMesh&) = delete;
  PendingMesh& operator=(const PendingMesh&) = delete;

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(hellos_.size()); }
  const std::vector<std::string>& hellos() const { return hellos_; }  // one per rank

  bool taken() const { return taken_; }
  Mesh take();  // the connections, once; Error(kState) the second time
  // Sends a goodbye with the reason, so that the other ranks do not report a death; idempotent.
  void close(const std::string& reason = "");

 private:
  int rank_;
  Mesh mesh_;  // empty once it was taken
  std::vector<std::string> hellos_;
  bool taken_ = false;
};

}  // namespace ringdp
