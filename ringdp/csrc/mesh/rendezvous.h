// How the ranks of a job meet: they publish who and where they are in the store, connect each to each, and prove that they
// know the job's secret. Blocking, with a deadline; runs once per Runtime, on the thread that creates it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "mesh/link.h"
#include "mesh/store.h"

namespace ringdp {

enum class TransportChoice {
  kAuto,  // shared memory inside a host where it is to be had, else TCP
  kTcp,
  kShm  // a rank of the same host that cannot share memory is an error
};

TransportChoice transport_choice(const std::string& name);  // "auto", "tcp", "shm"; else throws Error(kValue)
std::string transport_name(TransportChoice choice);

struct RendezvousOptions {
  int rank = 0;
  int world = 1;
  uint32_t epoch = 0;             // restart count of the launcher
  std::vector<std::byte> secret;  // empty: rank 0 makes one and publishes it
  std::string host_name;          // empty: the system's
  std::string host_id;            // tells hosts apart that share a kernel
  std::string interface;          // which interfaces to publish, see select_interfaces; empty: all
  std::string advertise;          // an address or name to publish before them, perhaps with a port
  uint16_t port_low = 0;          // 0..0: any port
  uint16_t port_high = 0;
  bool several_hosts = false;  // known beforehand: listen on more than loopback at once
  std::string hello;           // a line for all others, see MetPeer
  std::string tables;          // "name=value" words that must be the same on all ranks: the algorithm tables
  std::string tables_source;   // where they are from, for messages
  TransportChoice transport = TransportChoice::kAuto;
  std::size_t shm_ring_bytes = 0;  // shared with each rank of this host, each way; 0: see shared_ring_bytes
  int64_t timeout_ms = 60'000;
  int64_t absent_ms =
      0;  // how long to wait for ranks that have not come at all; `timeout_ms` then counts from when all
          // have. 0: `timeout_ms` is for everything
  int64_t first_notice_ms = 10'000;       // when the log says who is waited for; then at doubling intervals
  std::function<void()> check_interrupt;  // called now and then while meeting; may throw
};

struct MetPeer {
  PeerInfo info;
  std::string host_identity;
  std::string hello;
  std::unique_ptr<Channel> channel;  // null for this rank itself
  std::string transport = {};        // "shm", "tcp"; empty for this rank itself
};

// One entry per rank. Whatever goes wrong on one rank is told to all through the store, so that every rank raises the same
// story: Error(kHandshake) for ranks that differ or cannot reach each other (with every address tried), Error(kPeerLost) for
// one that died on the way, Error(kTimeout) naming those that are missing, Error(kSystem).
std::vector<MetPeer> meet(Store& store, const RendezvousOptions& options);

}  // namespace ringdp
