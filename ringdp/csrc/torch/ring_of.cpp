#include "torch/ring_of.h"

#include <algorithm>

namespace ringdp {

ProcessGroupRing* ring_of(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto types = group.getDeviceTypes();
  if (std::find(types.begin(), types.end(), c10::Device(device)) == types.end()) return nullptr;
  return dynamic_cast<ProcessGroupRing*>(group.getBackend(device).get());
}

}  // namespace ringdp
