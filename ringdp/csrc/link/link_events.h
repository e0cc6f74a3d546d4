// LinkEvents: a Link's calls to its owner, on the thread that drives the engine.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "link/flow.h"
#include "link/frame.h"

namespace ringdp {

// Whether this rank has started an operation, and its description; null if the operation ended long ago.
struct StartedOperation {
  bool started = false;
  const FlowIdentity* identity = nullptr;
};

struct LinkEvents {
  std::function<void(int peer, uint64_t group, const AbortNotice&)> aborted;
  std::function<void(Disagreement)> mismatched;                       // the payload is dropped, the group must fail
  std::function<void(int peer, const std::string& reason)> departed;  // the peer said goodbye
  std::function<void(int peer, uint64_t group, uint64_t sequence, bool with_stacks)> asked;
  std::function<void(int peer, uint64_t group, uint64_t sequence, PeerState)> answered;
  std::function<void(int peer, uint64_t group, uint64_t sequence, std::string stacks)> on_stacks = {};
  std::function<StartedOperation(uint64_t group, uint64_t sequence)> started;
  std::function<void(int peer)> wanted = {};  // the link needs a connection
};

}  // namespace ringdp
