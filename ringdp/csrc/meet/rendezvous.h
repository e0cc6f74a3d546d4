// The rendezvous: each rank publishes its identity and addresses in the store, connects to all others (in large jobs
// to some: meet/rendezvous.h), and authenticates with the job's secret. Blocking, with a deadline; runs once per
// Runtime, on the thread that creates it.
//
// Which pairs of ranks are connected from the start. In a small job all are. In a large one a rank starts with
// connections to a few others, over which a failure reaches every rank in some log2(n) steps, and connects to the rest
// when it needs them. Pure functions, any thread.
//
// PendingMesh: the connections after the rendezvous, before the ranks choose a backend. Each rank has a short text
// (`hello`) that all others get. Owned by Python (job/process_group.py); made, read and destroyed by one thread.
//
// RendezvousWait: the deadline of the rendezvous, and the times of the log lines that name the missing ranks. Owned by
// a RendezvousRun and used by its thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/log.h"
#include "link/link.h"
#include "meet/addresses.h"
#include "meet/established.h"
#include "meet/handshake.h"
#include "meet/store.h"
#include "transport/tcp.h"
#include "transport/transport.h"

namespace ringdp {

inline constexpr int kFullMeshRanks = 16;  // up to so many ranks, all pairs are connected

// The members of a group of `size` at distance 1, 2, 4, … on either side of `place`, modulo `size`; ascending.
std::vector<int> overlay_neighbours(int place, int size);

// Symmetric in `a` and `b`. In jobs of more than `full_mesh_ranks` ranks: overlay neighbours, and those of ReadyTree.
bool connected_from_start(int a, int b, int world, int full_mesh_ranks);

// Which host this is.
struct HostNames {
  std::string name;  // empty: the system's
  std::string id;    // tells hosts apart that share a kernel
  std::string site;  // of hosts far apart; all ranks have one, or none has
};

// Where the others reach this rank.
struct Addresses {
  std::string interface;  // which interfaces to publish, see select_interfaces; empty: all
  std::string advertise;  // an address or name to publish before them; may have a port
  uint16_t port_low = 0;  // 0..0: any port
  uint16_t port_high = 0;
  bool several_hosts = false;  // known beforehand: listen on more than loopback at once
  DoorWay door = {};
  // whose addresses the others have already; empty: opens and publishes them
  std::function<std::vector<TcpListener>()> listeners = {};
};

// The connections to make.
struct LinkSettings {
  const Transport* transport = nullptr;  // null: auto, the best one that works
  bool checksums = false;                // of the frames over transports that have them; the same on all ranks
  int streams = kAutomaticStreams;       // connections of a pair over TCP, the same on all ranks; see ExtraStreams
  std::string congestion = "auto";       // of the connections to other hosts, see ask_for_congestion
  int full_mesh_ranks = kFullMeshRanks;  // in jobs of more, pairs connect when they first need it; the same on all
  bool heals = true;                     // replaces broken connections: this rank keeps listening
  std::shared_ptr<const TlsContext> tls = {};  // over TCP; null: none. The same mode on all
  std::size_t shm_ring_bytes = 0;              // shared with each rank of this host, each way; 0: see shared_ring_bytes
};

// How long to wait for the others.
struct Waiting {
  int64_t timeout_ms = 60'000;
  // For ranks that have not published yet; `timeout_ms` then starts when all have. 0: `timeout_ms` is for both.
  int64_t absent_ms = 0;
  int64_t first_notice_ms = 10'000;       // when the log first names the missing ranks; then at doubling intervals
  std::function<void()> check_interrupt;  // called at intervals during the rendezvous; may throw
};

// What the algorithm tables say, which must be the same on all ranks.
struct TablesText {
  std::string text;    // "name=value" items
  std::string source;  // where they are from, for messages
};

struct RendezvousOptions {
  int rank = 0;
  int world = 1;
  uint32_t epoch = 0;             // restart count of the launcher
  std::vector<std::byte> secret;  // empty: rank 0 makes one and publishes it
  std::string hello;              // a line for all others, see MeshPeer
  HostNames host = {};
  Addresses addresses = {};
  LinkSettings links = {};
  Waiting waiting = {};
  TablesText tables = {};
  std::optional<JobId> job;  // the same on all ranks; nullopt: rank 0 makes one and publishes it
};

struct MeshPeer {
  PeerInfo info;
  std::string host_identity;
  std::string site;  // empty: no rank names one
  std::string hello;
  std::unique_ptr<Channel> channel;      // null for this rank itself, and for a peer that is not connected yet
  const Transport* transport = nullptr;  // the present or future one; null for this rank itself
  bool relayed = false;                  // the connection of the start leads through the door
  bool tls = false;                      // over its connections
  bool checksums = false;                // both ends send them behind the headers of their frames
};

class ConnectionThread;

struct Mesh {
  Mesh();
  ~Mesh();
  Mesh(Mesh&&) noexcept;
  Mesh& operator=(Mesh&&) noexcept;

  std::vector<MeshPeer> peers;  // one per rank
  // Makes missing connections, and replaces broken ones; null if neither can happen.
  std::unique_ptr<ConnectionThread> late;
  // The longest round trip between two ranks that connected at the start, rounded down to a power of two; the same on
  // all ranks.
  int64_t round_trip_us = 0;
};

// A failure of one rank is published in the store, so that all ranks raise the same error: Error(kHandshake) for ranks
// that differ or cannot reach each other (with every address tried), Error(kPeerLost) for one that died,
// Error(kTimeout) naming those that are missing, Error(kSystem).
Mesh meet(Store& store, const RendezvousOptions& options);

// How long a rank leaves the store alone after reading it, when nothing new has come for that long: longer in a large
// job, since the store answers all ranks together.
std::chrono::milliseconds store_pause(Clock::duration quiet, int world);

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

class RendezvousWait {
 public:
  static constexpr int kPollMs = 50;  // the interval of looking for signals

  explicit RendezvousWait(const RendezvousOptions& options)
      : rank_(options.rank),
        world_(options.world),
        timeout_ms_(options.waiting.timeout_ms),
        counts_anew_(options.waiting.absent_ms > 0),
        deadline_(Deadline::after_ms(counts_anew_ ? options.waiting.absent_ms : timeout_ms_)),
        notice_every_(options.waiting.first_notice_ms),
        notice_at_(begin_ + notice_every_) {}

  const Deadline& deadline() const { return deadline_; }
  Clock::duration waited() const { return Clock::now() - begin_; }

  bool all_came() const { return all_came_; }  // all records were read; only connections are missing
  void note_all_came() {
    if (!all_came_ && counts_anew_) deadline_ = Deadline::after_ms(timeout_ms_);
    all_came_ = true;
  }

  // At doubling intervals.
  bool notice_due() {
    if (Clock::now() < notice_at_) return false;
    notice_every_ *= 2;
    notice_at_ += notice_every_;
    return true;
  }
  void notice(const std::string& what) const {
    log(LogLevel::kWarning, "rank " + std::to_string(rank_) + " of " + std::to_string(world_) + " waits for " + what);
  }

 private:
  const int rank_;
  const int world_;
  const int64_t timeout_ms_;
  const bool counts_anew_;  // the deadline starts again once all have come
  const Clock::time_point begin_ = Clock::now();
  Deadline deadline_;
  std::chrono::milliseconds notice_every_;
  Clock::time_point notice_at_;
  bool all_came_ = false;
};

}  // namespace ringdp
