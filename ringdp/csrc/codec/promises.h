// Whether a codec keeps what codec.h and include/ringdp/compressor.h say, found out by trying: for codecs that others
// wrote. Stateless, any thread.
#pragma once

#include <string>
#include <vector>

#include "codec/codec.h"

namespace ringdp {

// What it does not keep, a sentence each. Ends with the first write that went astray: what follows such a one means
// nothing.
std::vector<std::string> broken_promises(const Codec& codec);

}  // namespace ringdp
