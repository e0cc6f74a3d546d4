// How a rank leaves: it says so to its peers, sends what waits and lets them read it. By the thread that drives the
// engine.
#pragma once

#include <string>

#include "base/deadline.h"
#include "engine/peer_links.h"

namespace ringdp {

// `reason`: why it leaves.
void say_goodbye(PeerLinks& links, const std::string& reason);

// Every peer has read the goodbye, and all that was sent before it, or is gone itself. Of one whose connection is
// whole and whose host has all of it that is not waited for long: it may be stopped. `heal_ms`: how long a connection
// may take to be made again.
bool parted(const PeerLinks& links, Clock::time_point since, int64_t heal_ms);

// Returns at the deadline at the latest.
void end_connections(PeerLinks& links, Deadline deadline);

}  // namespace ringdp
