// PendingCopies: keeps the buffers of ended operations while copies to or from a device use them. A work is done when
// its last copy back is queued; until that copy has ended, even after a failure in the middle of the copies, the
// memory must not be reused. Owned by the engine; used by the thread that drives it. The buffers of a copy that never
// ends are never freed.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "device/staging.h"

namespace ringdp {

class PendingCopies {
 public:
  ~PendingCopies();

  void wait_for(std::shared_ptr<Staging> staging, std::shared_ptr<void> buffers);
  // Passes the buffers whose copies have ended to `release`, which drops them on a thread that may take Python's lock.
  void look(const std::function<void(std::shared_ptr<void>)>& release);
  bool empty() const { return under_way_.empty(); }

 private:
  struct PendingCopy {
    std::shared_ptr<Staging> staging;  // shared with the caller's work, which orders streams after it
    std::shared_ptr<void> buffers;     // with the caller
  };
  std::vector<PendingCopy> under_way_;
  std::vector<PendingCopy> lost_;  // the device does not report their end any more
};

}  // namespace ringdp
