#include "engine/landing.h"

#include <algorithm>
#include <exception>

namespace ringdp {

Landing::~Landing() {
  if (under_way_.empty() && lost_.empty()) return;
  // A device that does not answer may still write there.
  [[maybe_unused]] auto* under_way = new std::vector<Flight>(std::move(under_way_));
  [[maybe_unused]] auto* lost = new std::vector<Flight>(std::move(lost_));
}

void Landing::wait_for(std::shared_ptr<Staging> staging, std::shared_ptr<void> buffers) {
  under_way_.push_back({std::move(staging), std::move(buffers)});
}

void Landing::look(const std::function<void(std::shared_ptr<void>)>& release) {
  std::erase_if(under_way_, [&](Flight& flight) {
    try {
      if (!flight.staging->landed()) return false;
      release(std::make_shared<Flight>(std::move(flight)));
    } catch (const std::exception&) {  // the operations that use the device now report it
      lost_.push_back(std::move(flight));
    }
    return true;
  });
}

}  // namespace ringdp
