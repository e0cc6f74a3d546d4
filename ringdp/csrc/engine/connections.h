// Connections: the engine's interface for the thread that makes connections (meet/connection_thread.h). Owned by the
// Engine. Any thread; each call runs while no other thread drives the engine.
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
