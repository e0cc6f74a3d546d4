// RendezvousRun: the state of one `meet`. A loop that looks into the store, moves the connections on, and watches who dies.
// Used by one thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mesh/addresses.h"
#include "mesh/connector.h"
#include "mesh/host.h"
#include "mesh/job.h"
#include "mesh/rendezvous.h"
#include "mesh/shared_setup.h"

namespace ringdp {

// What a rank tells the others of itself before they meet: host, process, networks, and what it asks for.
Record introduction(const RendezvousOptions& options);

class RendezvousRun {
 public:
  RendezvousRun(Store& store, const RendezvousOptions& options);

  Mesh run();

  // After an error on this rank: tells the others, or, where one of them was first, turns it into that rank's story.
  // `stopped`: by an exception that is not an Error (an interrupt). Throws only StoreLost.
  Error settle_error(const Error& error, bool stopped);
  Error store_lost(const Error& error) const;

 private:
  struct Peer {
    PeerInfo info;
    ProcessId process;
    std::string network;
    std::string identity;
    std::string site;
    std::vector<std::string> ips;
    std::string hello;
    const Transport* transport = nullptr;  // what it names in RINGDP_TRANSPORT; null: auto
    bool present = false;                  // its `who` was read
    bool placed = false;                   // its `at` was read
    bool suspected = false;
  };

  void introduce();
  bool look();  // into the store, for what is missing; true if something was there
  bool ask();
  void take(std::pair<bool, int> question, const std::string& text);
  void take_job(const std::string& text);
  void take_who(int peer, const Record& record);
  void take_at(int peer, const std::string& text);
  void listen_if_known();
  std::vector<std::string> addresses_to_listen_on(bool alone) const;
  void check_processes();
  // Whether two ranks are to be connected before `run` returns.
  bool at_start(int a, int b) const { return connected_from_start(a, b, world_, options_.full_mesh_ranks); }
  bool at_start(int peer) const { return at_start(rank_, peer); }
  void check_connections();
  void note_arrivals();
  void say_who_is_missing();
  [[noreturn]] void time_out();
  std::string missing_text() const;

  // Once everybody is connected (meeting_shared.cpp).
  TransportChoice transport_between(const Peer& a, const Peer& b) const;
  void check_settings() const;
  void set_up_transports();
  std::unique_ptr<LateConnections> leave_the_rest();
  SharedSetup::Plan sharing_plan() const;
  void check_sharing() const;
  void hear_trouble_now_and_then(Clock::time_point& next, Clock::time_point begin);
  std::string what_for() const;
  void tell_transports() const;

  void linger(int limit_ms, int dead);  // the store may end with this process: the others are to hear first

  void tell(const Error& error);  // the connected peers, where no store does
  Error failure(int from, const GivenUp& why) const;
  // `story` must be true on every rank.
  Error failure(ErrorKind kind, int peer, const std::string& story, const std::string& advice) const;
  std::optional<Error> heard_trouble();  // what another rank told

  Store& store_;
  const RendezvousOptions& options_;
  const int rank_;
  const int world_;
  const Record introduction_;
  Deadline deadline_;
  const Clock::time_point begin_ = Clock::now();
  std::vector<Interface> interfaces_;
  std::vector<Peer> peers_;
  std::optional<Job> job_;
  std::optional<Connector> connector_;
  std::optional<SharedSetup> sharing_;
  Clock::time_point check_after_ = begin_;
  Clock::time_point notice_at_;
  std::chrono::milliseconds notice_every_;
  Clock::time_point last_news_ = begin_;  // from the store
  std::size_t next_question_ = 0;
  bool complete_ = false;  // everybody has come
  bool heard_ = false;
  std::optional<StoreLost> store_lost_;  // after all were connected
};

}  // namespace ringdp
