// A rank's orderly exit: sends goodbyes and all queued frames, and waits until the peers have read them. By the thread
// that drives the engine.
#pragma once

#include <string>

#include "base/deadline.h"
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

}  // namespace ringdp
