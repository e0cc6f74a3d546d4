// The backend "ring" of a process group, for what torch's interface has no call for. Any thread.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/process_group.h"

namespace ringdp {

// Null where the group uses another backend for that kind of device. Lives as long as the group.
ProcessGroupRing* ring_of(c10d::ProcessGroup& group, c10::DeviceType device);

}  // namespace ringdp
