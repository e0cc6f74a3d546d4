// Reconfiguration: a rendezvous without a store, for torch's reconfigure. Each rank has a handle, a text with its
// addresses, identity and settings; the caller gives all handles to all ranks, and the ranks connect by them. Owned by
// a process group's Reconfigurer, or by a test; used by one thread at a time.
#pragma once

#include <array>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "meet/rendezvous.h"

namespace ringdp {

class Reconfiguration {
 public:
  // Of `options`, rank, world, epoch and job have no meaning here. Every pair of ranks is connected, however many they
  // are.
  explicit Reconfiguration(RendezvousOptions options);

  // This rank's handle: the same as long as it lives, one line of printable characters. A process that has all handles
  // of a group can join it, unless the ranks have a secret file (RINGDP_SECRET_FILE). Throws Error(kSystem) if it
  // cannot listen.
  const std::string& handle();

  struct Members {
    int64_t uuid = 0;  // of this attempt; the same on all ranks, and new
    std::vector<std::string> handles;
    bool ordered = true;  // by rank; otherwise the ranks of a host follow each other
  };
  struct Outcome {
    int rank = -1;
    int world = 0;
    Mesh mesh;
  };
  // Connects to all members. Blocks; `check_interrupt` is called now and then and may throw. Returns when all of them
  // are connected, and otherwise throws what `meet` throws, on every surviving rank; Error(kState) for a uuid that was
  // used before, Error(kValue) for handles that are not a group with this rank in it.
  Outcome meet(const Members& members, int64_t timeout_ms, const std::function<void()>& check_interrupt);

 private:
  RendezvousOptions options_;
  std::array<std::byte, 16> incarnation_{};  // identifies this process group, also against its predecessors
  std::array<std::byte, 32> token_{};        // its part of the secret, where there is no secret file
  std::vector<TcpListener> listeners_;
  std::string handle_;
  std::set<int64_t> used_;  // uuids
};

}  // namespace ringdp
