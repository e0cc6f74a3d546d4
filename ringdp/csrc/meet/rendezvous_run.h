// RendezvousRun: one `meet`: a loop that reads the other ranks' records (PeerRecords), advances the connections
// (Connector) and checks which processes die, until this rank has all connections of the start. Then the
// TransportSetup makes channels of them. RendezvousFailure publishes failures. Owned by the caller of `meet`, and used
// by its thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "meet/addresses.h"
#include "meet/connector.h"
#include "meet/job.h"
#include "meet/peer_records.h"
#include "meet/rendezvous.h"
#include "meet/rendezvous_failure.h"
#include "meet/transport_setup.h"

namespace ringdp {

class RendezvousRun {
 public:
  RendezvousRun(Store& store, const RendezvousOptions& options);

  Mesh run();

  // After an error of `run`: the error that this rank raises, published to the others. See RendezvousFailure.
  Error agree_on_error(const Error& error, bool stopped);
  Error store_lost(const Error& error) const { return failure_.store_lost(error); }

 private:
  void introduce();
  void connect();
  bool look();  // reads missing records; true if there were any
  void take_job(const std::string& text);
  void set_route(int peer);
  void listen_if_known();
  std::vector<std::string> addresses_to_listen_on(bool alone) const;
  // Whether this rank and that one connect before `run` returns.
  bool at_start(int peer) const { return connected_from_start(rank_, peer, world_, options_.full_mesh_ranks); }
  bool connected(int peer) const { return connector_ && connector_->connected(peer); }
  bool look_at_ended();  // of connections that have ended; true: one has
  void check_processes();
  void check_connections();
  std::string missing_text() const;
  [[noreturn]] void time_out();
  Mesh mesh();
  std::unique_ptr<ConnectionThread> leave_the_rest();

  Store& store_;
  const RendezvousOptions& options_;
  const int rank_;
  const int world_;
  std::vector<Interface> interfaces_;
  PeerRecords ranks_;
  RendezvousFailure failure_;
  RendezvousWait wait_;
  TransportSetup transports_;
  std::optional<Job> job_;
  std::optional<Connector> connector_;
  std::vector<char> suspected_;  // per rank: its process was once not found
  Clock::time_point check_after_ = Clock::now();
  Clock::time_point last_answer_ = check_after_;  // the last new record in the store
};

}  // namespace ringdp
