// TransportSetup: the second half of the rendezvous: sets up shared memory with the ranks of this host, or finds why
// it cannot, and waits until all ranks have done so. A connection that ends meanwhile is replaced. Blocks until the
// RendezvousWait is over at most. Owned by a RendezvousRun and used by its thread; owns the connections from `run` on,
// in a SharedSetup.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "meet/connector.h"
#include "meet/records.h"
#include "meet/rendezvous.h"
#include "meet/store.h"
#include "shared/shared_setup.h"

namespace ringdp {

class TransportSetup {
 public:
  TransportSetup(const RendezvousOptions& options, const PeerRecords& ranks, RendezvousFailure& failure,
                 RendezvousWait& wait)
      : options_(options), rank_(options.rank), world_(options.world), ranks_(ranks), failure_(failure), wait_(wait) {}

  // Throws if ranks name transports or sites that exclude each other. The same error on all ranks: each checks all
  // pairs.
  void check_settings() const;
  // Takes the connections from `connector`, which also replaces those that end. `look`: checks which ranks live;
  // called at intervals, may throw. Throws what RendezvousRun::run does.
  void run(Connector& connector, const std::function<void()>& look);

  // Per rank: whether its connection leads through the door.
  const std::vector<char>& relayed() const { return relayed_; }
  bool begun() const { return sharing_.has_value(); }
  SharedSetup& sharing() { return *sharing_; }

 private:
  bool at_start(int peer) const { return connected_from_start(rank_, peer, world_, options_.links.full_mesh_ranks); }
  SharedSetup::Plan plan() const;
  void begin(std::vector<Connector::Connected> connected);
  void wait_for_all(Connector& connector, const std::function<void()>& look);
  bool step(Connector& connector);  // true: a connection has ended
  void check() const;
  void check_failures(Clock::time_point& next, Clock::time_point begin);
  std::string what_for() const;
  void log_transports() const;

  const RendezvousOptions& options_;
  const int rank_;
  const int world_;
  const PeerRecords& ranks_;
  RendezvousFailure& failure_;
  RendezvousWait& wait_;
  std::optional<SharedSetup> sharing_;
  std::string congestion_problem_;
  std::vector<char> relayed_ = std::vector<char>(static_cast<std::size_t>(world_), 0);
  std::map<std::size_t, std::vector<int>> with_streams_;  // ranks, by how many
  std::vector<int> cut_;                                  // peers whose connection is being replaced
  std::optional<StoreLost> store_lost_;                   // after all were connected
};

}  // namespace ringdp
