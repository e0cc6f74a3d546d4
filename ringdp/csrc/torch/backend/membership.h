// Membership: a process group's Runtime, group and listener. Replaced as a whole when the group is reconfigured. Value
// type.
#pragma once

#include <memory>

#include "engine/group.h"

namespace ringdp {

struct Membership {
  std::shared_ptr<Runtime> runtime;  // all three null in a group that waits for its first reconfigure
  std::shared_ptr<GroupHandle> group;
  std::shared_ptr<const FailureListener> listener;  // runs the abort hooks when the group fails

  // Operations in flight fail; the abort hooks do not run.
  void close(const std::string& how = "destroyed") {
    listener.reset();
    if (group) group->close(how);
  }
};

}  // namespace ringdp
