#pragma once

#include <cstdint>

namespace fake_cuda {

// The address of a ringdp::DeviceCodec for the fake device, which never ends, from that of the host's.
uintptr_t codec_over(uintptr_t host);

}  // namespace fake_cuda
