// MessageMatching: starts sends and receives as soon as their other ends are known. A send starts at once; a receive
// from any rank waits until a message has begun to arrive. Owned by Progress, which calls it; used by the thread that
// drives. Waiting receives are in the GroupState.
#pragma once

#include <functional>

#include "engine/driver_role.h"
#include "engine/failure_agreement.h"
#include "engine/group_table.h"
#include "engine/peer_links.h"

namespace ringdp {

class MessageMatching {
 public:
  // `start`: an operation that has its number. `want_connection`: see EngineOptions.
  using Start = std::function<void(GroupState&, InFlight&)>;

  MessageMatching(PeerLinks& links, FailureAgreement& failures, std::function<void(int peer)> want_connection,
                  Start start);

  void take(GroupState& group, InFlight in_flight);
  bool bind_receives(GroupState& group);  // true if one has found its sender

 private:
  void number(GroupState& group, InFlight in_flight);
  int find_sender(const GroupState& group, PointToPoint ends);

  PeerLinks& links_;
  FailureAgreement& failures_;
  const std::function<void(int peer)> want_connection_;
  const Start start_;
};

}  // namespace ringdp
