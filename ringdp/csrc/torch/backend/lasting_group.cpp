#include "torch/backend/lasting_group.h"

namespace ringdp {

std::shared_ptr<ElasticGroup> LastingGroup::elastic() const {
  std::lock_guard lock(mutex_);
  return elastic_.lock();
}

int LastingGroup::getRank() const {
  const auto it = elastic();
  return it ? it->rank() : c10d::ProcessGroup::getRank();
}

int LastingGroup::getSize() const {
  const auto it = elastic();
  return it ? it->size() : c10d::ProcessGroup::getSize();
}

void LastingGroup::follow(const std::shared_ptr<ElasticGroup>& elastic) {
  std::lock_guard lock(mutex_);
  elastic_ = elastic;
}

}  // namespace ringdp
