// Tests whether a codec of a user keeps the contract of codec.h and include/ringdp/compressor.h. Stateless, any
// thread.
#pragma once

#include <string>
#include <vector>

#include "codec/codec.h"

namespace ringdp {

// A sentence for each broken rule. Stops at the first write out of bounds, since later results would mean nothing.
std::vector<std::string> broken_promises(const Codec& codec);

}  // namespace ringdp
