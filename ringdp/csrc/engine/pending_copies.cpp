#include "engine/pending_copies.h"

#include <algorithm>
#include <exception>

namespace ringdp {

PendingCopies::~PendingCopies() {
  if (under_way_.empty() && lost_.empty()) return;
  // A device that does not answer may still write there.
  [[maybe_unused]] auto* under_way = new std::vector<PendingCopy>(std::move(under_way_));
  [[maybe_unused]] auto* lost = new std::vector<PendingCopy>(std::move(lost_));
}

void PendingCopies::wait_for(std::shared_ptr<Staging> staging, std::shared_ptr<void> buffers) {
  under_way_.push_back({std::move(staging), std::move(buffers)});
}

void PendingCopies::look(const std::function<void(std::shared_ptr<void>)>& release) {
  std::erase_if(under_way_, [&](PendingCopy& copy) {
    try {
      if (!copy.staging->landed()) return false;
      release(std::make_shared<PendingCopy>(std::move(copy)));
    } catch (const std::exception&) {  // the operations that use the device now report it
      lost_.push_back(std::move(copy));
    }
    return true;
  });
}

}  // namespace ringdp
