// How many unauthenticated connections a process keeps open at once. A pure function of its limit of descriptors; any
// thread.
#pragma once

#include <cstddef>

namespace ringdp {

// `most`, but no more than a quarter of the descriptors that RLIMIT_NOFILE leaves to the process: the rest is for its
// ranks and its program. At least 1, so that a rank of this job can connect. `newest`: a descriptor that was opened
// just now, below which all numbers are in use; `held`: how many of those are unauthenticated connections.
std::size_t most_strangers(std::size_t most, int newest, std::size_t held);

}  // namespace ringdp
