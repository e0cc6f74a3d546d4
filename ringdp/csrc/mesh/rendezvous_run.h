// RendezvousRun: one `meet`: a loop that looks into the store for the other ranks (Introductions), moves the
// connections on (Connector) and watches who dies, until this rank is connected with all that it is to be connected
// with at the start. Then the TransportSetup makes channels of the connections. What goes wrong is told to all by
// RendezvousTrouble.
// Owned by the caller of `meet`, and used by its thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mesh/addresses.h"
#include "mesh/connector.h"
#include "mesh/introductions.h"
#include "mesh/job.h"
#include "mesh/rendezvous.h"
#include "mesh/rendezvous_trouble.h"
#include "mesh/rendezvous_wait.h"
#include "mesh/transport_setup.h"

namespace ringdp {

class RendezvousRun {
 public:
  RendezvousRun(Store& store, const RendezvousOptions& options);

  Mesh run();

  // After an error of `run`: what this rank raises, once the others were told. See RendezvousTrouble.
  Error settle_error(const Error& error, bool stopped);
  Error store_lost(const Error& error) const { return trouble_.store_lost(error); }

 private:
  void introduce();
  void connect();
  bool look();  // into the store, for what is missing; true if something was there
  void take_job(const std::string& text);
  void set_route(int peer);
  void listen_if_known();
  std::vector<std::string> addresses_to_listen_on(bool alone) const;
  // Whether this rank and that one are to be connected before `run` returns.
  bool at_start(int peer) const { return connected_from_start(rank_, peer, world_, options_.full_mesh_ranks); }
  bool connected(int peer) const { return connector_ && connector_->connected(peer); }
  bool look_at_ended();  // connections; true: one has
  void check_processes();
  void check_connections();
  std::string missing_text() const;
  [[noreturn]] void time_out();
  Mesh mesh();
  std::unique_ptr<LateConnections> leave_the_rest();

  Store& store_;
  const RendezvousOptions& options_;
  const int rank_;
  const int world_;
  std::vector<Interface> interfaces_;
  Introductions ranks_;
  RendezvousTrouble trouble_;
  RendezvousWait wait_;
  TransportSetup transports_;
  std::optional<Job> job_;
  std::optional<Connector> connector_;
  std::vector<char> suspected_;  // per rank: its process has been looked for once and not been found
  Clock::time_point check_after_ = Clock::now();
  Clock::time_point last_news_ = check_after_;  // from the store
};

}  // namespace ringdp
