// Lobby: ranks that have met and stay connected, before it is decided what for. Each brings a few words (`hello`) that all
// others get. Made, read and destroyed by one thread.
#pragma once

#include <string>
#include <vector>

#include "mesh/rendezvous.h"

namespace ringdp {

class Lobby {
 public:
  Lobby(Store& store, const RendezvousOptions& options) : rank_(options.rank), peers_(meet(store, options)) {}
  ~Lobby() { close(); }
  Lobby(const Lobby&) = delete;
  Lobby& operator=(const Lobby&) = delete;

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(peers_.size()); }
  std::vector<std::string> hellos() const;  // one per rank

  bool taken() const { return taken_; }
  std::vector<MetPeer> take();  // the connections, once; Error(kState) the second time
  void close();  // says goodbye, so that ranks that are still meeting do not take it for a death; idempotent

 private:
  int rank_;
  std::vector<MetPeer> peers_;
  bool taken_ = false;
};

}  // namespace ringdp
