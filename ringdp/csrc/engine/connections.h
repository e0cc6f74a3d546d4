// Connections: the engine's interface for the thread that makes connections (meet/connection_thread.h). Owned by the
// Engine. Any thread; each call runs while no other thread drives the engine.
//
// A rank's orderly exit: sends goodbyes and all queued frames, and waits until the peers have read them. By the thread
// that drives the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/fd.h"
#include "engine/driver_role.h"
#include "engine/failure_agreement.h"
#include "engine/healing.h"
#include "engine/peer_links.h"

namespace ringdp {

// `reason`: for the goodbye.
void say_goodbye(PeerLinks& links, const std::string& reason);

// Waits until every peer has read the goodbye and all bytes before it, or has ended. It does not wait long for a peer
// whose connection is intact and whose host has acknowledged all bytes, since it may be stopped. `heal_ms`: how long
// replacing a connection may take.
bool parted(const PeerLinks& links, Clock::time_point since, int64_t heal_ms);

// Returns at the deadline at the latest.
void end_connections(PeerLinks& links, Deadline deadline);

class Connections {
 public:
  Connections(DriverRole& role, PeerLinks& links, FailureAgreement& failures, Healing& healing)
      : role_(role), links_(links), failures_(failures), healing_(healing) {}

  // The first connection to a peer, which either side wanted; or the reason why there is none. `gone`: the peer has
  // ended.
  void connect(int peer, std::unique_ptr<Channel> channel, bool checksums);
  void cannot_connect(int peer, const Error& error, bool gone);

  // A replacement of a broken connection: see Healing.
  bool hold(int peer);
  std::optional<uint64_t> settle(int peer);
  void resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken);
  void add_stream(int peer, Fd socket);
  void not_healed(int peer, const std::string& why);

  void wait_until_whole(Deadline deadline);  // no connection heals any more
  uint64_t healed();                         // how often one has

 private:
  bool closed() const;

  DriverRole& role_;
  PeerLinks& links_;
  FailureAgreement& failures_;
  Healing& healing_;
};

}  // namespace ringdp
