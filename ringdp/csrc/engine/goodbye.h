// How a rank leaves: it says so to its peers, sends what waits and lets them read it. By the thread that drives the engine.
#pragma once

#include <string>

#include "base/deadline.h"
#include "engine/peer_links.h"

namespace ringdp {

// `reason`: why it leaves. Returns at the deadline at the latest.
void say_goodbye(PeerLinks& links, const std::string& reason, Deadline deadline);

}  // namespace ringdp
