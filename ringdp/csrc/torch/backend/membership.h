// Membership: what a process group moves its bytes with. Replaced as a whole when the group is reconfigured. Value type.
#pragma once

#include <memory>

#include "engine/group.h"

namespace ringdp {

struct Membership {
  std::shared_ptr<Runtime> runtime;  // both null in a group that waits for its first reconfigure
  std::shared_ptr<GroupHandle> group;
};

}  // namespace ringdp
