// In place of torch/device/cuda/device_codec.cpp where the build has no kernels.
#include "torch/device/device_codec.h"

namespace ringdp {

const DeviceCodec* cuda_codec() { return nullptr; }

}  // namespace ringdp
