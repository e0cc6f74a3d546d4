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

struct RendezvousOptions {
  int rank = 0;
  int world = 1;
  uint32_t epoch = 0;             // restart count of the launcher
  std::vector<std::byte> secret;  // empty: rank 0 makes one and publishes it
  std::string host_name;          // empty: the system's
  std::string host_id;            // tells hosts apart that share a kernel
  std::string interface;          // name or address to listen on when the ranks are on several hosts; empty: by route
  std::string advertise;          // address to publish instead of the one listened on
  uint16_t port_low = 0;          // 0..0: any port
  uint16_t port_high = 0;
  int64_t timeout_ms = 60'000;
  std::function<void()> check_interrupt;  // called now and then while connecting; may throw
};

struct MetPeer {
  PeerInfo info;
  std::string host_identity;
  std::unique_ptr<Channel> channel;  // null for this rank itself
};

// One entry per rank. Throws Error(kHandshake), Error(kTimeout) naming the ranks that are missing, or Error(kSystem).
std::vector<MetPeer> meet(Store& store, const RendezvousOptions& options);

}  // namespace ringdp
