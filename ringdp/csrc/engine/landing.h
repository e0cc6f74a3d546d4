// Landing: the buffers of operations that are over, while copies to or from a device still touch them. A work is done when
// its last copy back is queued; until that copy is done, and where an operation failed in the middle of its copies, nobody
// else may have that memory.
// Owned by the engine; used by the thread that drives it. What never lands is never freed.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "device/staging.h"

namespace ringdp {

class Landing {
 public:
  ~Landing();

  void wait_for(std::shared_ptr<Staging> staging, std::shared_ptr<void> buffers);
  // `release` takes what has landed, and drops it where that may take Python's lock.
  void look(const std::function<void(std::shared_ptr<void>)>& release);
  bool empty() const { return under_way_.empty(); }

 private:
  struct Flight {
    std::shared_ptr<Staging> staging;  // shared with the caller's work, which orders streams after it
    std::shared_ptr<void> buffers;     // with the caller
  };
  std::vector<Flight> under_way_;
  std::vector<Flight> lost_;  // the device cannot say any more whether they have landed
};

}  // namespace ringdp
