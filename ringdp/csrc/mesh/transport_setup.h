// TransportSetup: what a rank does once it is connected with all that it connects with at the start: it comes to share
// memory with the ranks of its host, or learns why not, and waits until all ranks have got as far. What ends meanwhile
// is connected again. Blocking, until the RendezvousWait is over. Owned by a RendezvousRun and used by its thread;
// owns the connections from `run` on, in a SharedSetup.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "mesh/connector.h"
#include "mesh/introductions.h"
#include "mesh/rendezvous.h"
#include "mesh/rendezvous_trouble.h"
#include "mesh/rendezvous_wait.h"
#include "mesh/shared_setup.h"
#include "mesh/store.h"

namespace ringdp {

class TransportSetup {
 public:
  TransportSetup(const RendezvousOptions& options, const Introductions& ranks, RendezvousTrouble& trouble,
                 RendezvousWait& wait)
      : options_(options), rank_(options.rank), world_(options.world), ranks_(ranks), trouble_(trouble), wait_(wait) {}

  // Throws where ranks name transports or sites that do not go together. The same on all ranks: each looks at all
  // pairs.
  void check_settings() const;
  // Takes the connections from there, and asks it for others where some end. `look`: at who lives; called now and
  // then, may throw. Throws what RendezvousRun::run does.
  void run(Connector& connector, const std::function<void()>& look);

  bool begun() const { return sharing_.has_value(); }
  SharedSetup& sharing() { return *sharing_; }

 private:
  bool at_start(int peer) const { return connected_from_start(rank_, peer, world_, options_.full_mesh_ranks); }
  SharedSetup::Plan plan() const;
  void begin(std::vector<Connector::Connected> connected);
  void wait_for_all(Connector& connector, const std::function<void()>& look);
  bool step(Connector& connector);  // true: a connection has ended
  void check() const;
  void hear_trouble_now_and_then(Clock::time_point& next, Clock::time_point begin);
  std::string what_for() const;
  void tell_transports() const;

  const RendezvousOptions& options_;
  const int rank_;
  const int world_;
  const Introductions& ranks_;
  RendezvousTrouble& trouble_;
  RendezvousWait& wait_;
  std::optional<SharedSetup> sharing_;
  std::string congestion_problem_;
  std::map<std::size_t, std::vector<int>> with_streams_;  // ranks, by how many
  std::vector<int> cut_;                                  // peers with whom another connection is made
  std::optional<StoreLost> store_lost_;                   // after all were connected
};

}  // namespace ringdp
