// How the ranks of a job meet: they publish who and where they are in the store, connect each to each (in large jobs,
// to some others: mesh/overlay.h), and prove that they know the job's secret. Blocking, with a deadline; runs once per
// Runtime, on the thread that creates it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "mesh/extra_streams.h"
#include "mesh/handshake.h"
#include "mesh/link.h"
#include "mesh/overlay.h"
#include "mesh/store.h"
#include "transport/tcp.h"
#include "transport/transport.h"

namespace ringdp {

struct RendezvousOptions {
  int rank = 0;
  int world = 1;
  uint32_t epoch = 0;             // restart count of the launcher
  std::vector<std::byte> secret;  // empty: rank 0 makes one and publishes it
  std::string host_name;          // empty: the system's
  std::string host_id;            // tells hosts apart that share a kernel
  std::string site;               // where this host stands, for hosts far apart; all ranks name theirs, or none does
  std::string interface;          // which interfaces to publish, see select_interfaces; empty: all
  std::string advertise;          // an address or name to publish before them, perhaps with a port
  uint16_t port_low = 0;          // 0..0: any port
  uint16_t port_high = 0;
  bool several_hosts = false;            // known beforehand: listen on more than loopback at once
  std::string hello;                     // a line for all others, see MeshPeer
  std::string tables;                    // "name=value" words that must be the same on all ranks: the algorithm tables
  std::string tables_source;             // where they are from, for messages
  const Transport* transport = nullptr;  // null: auto, the best one that can be had
  bool checksums = false;                // of the frames over transports that have them; the same on all ranks
  int streams = kAutomaticStreams;       // connections of a pair over TCP, the same on all ranks; see ExtraStreams
  std::string congestion = "auto";       // of the connections to other hosts, see ask_for_congestion
  int full_mesh_ranks =
      kFullMeshRanks;              // in jobs of more, pairs connect when they first need it; the same on all ranks
  bool heals = true;               // connections that break are made again, of this rank's side: it goes on listening
  std::size_t shm_ring_bytes = 0;  // shared with each rank of this host, each way; 0: see shared_ring_bytes
  int64_t timeout_ms = 60'000;
  // how long to wait for ranks that have not come at all; `timeout_ms` then counts from when all have. 0: `timeout_ms`
  // is for everything
  int64_t absent_ms = 0;
  int64_t first_notice_ms = 10'000;       // when the log says who is waited for; then at doubling intervals
  std::function<void()> check_interrupt;  // called now and then while meeting; may throw
  std::optional<JobId> job;               // the same on all ranks; nullopt: rank 0 makes one and publishes it
  std::function<std::vector<TcpListener>()> listeners = {};  // that the others know already; empty: opened, published
};

struct MeshPeer {
  PeerInfo info;
  std::string host_identity;
  std::string site;  // empty: no rank names one
  std::string hello;
  std::unique_ptr<Channel> channel;      // null for this rank itself, and for a peer that is not connected yet
  const Transport* transport = nullptr;  // what it is or is going to be; null for this rank itself
  bool checksums = false;                // both ends put them behind the headers of their frames
};

class LateConnections;

struct Mesh {
  Mesh();
  ~Mesh();
  Mesh(Mesh&&) noexcept;
  Mesh& operator=(Mesh&&) noexcept;

  std::vector<MeshPeer> peers;  // one per rank
  // Makes the connections that are missing, and those again that have broken; null where neither can happen.
  std::unique_ptr<LateConnections> late;
  // The longest round trip between two ranks that connected at the start, rounded down to a power of two; the same on
  // all ranks.
  int64_t round_trip_us = 0;
};

// Whatever goes wrong on one rank is told to all through the store, so that every rank raises the same story:
// Error(kHandshake) for ranks that differ or cannot reach each other (with every address tried), Error(kPeerLost) for
// one that died on the way, Error(kTimeout) naming those that are missing, Error(kSystem).
Mesh meet(Store& store, const RendezvousOptions& options);

}  // namespace ringdp
