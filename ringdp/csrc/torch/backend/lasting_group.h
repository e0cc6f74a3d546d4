// LastingGroup: torch's process group in an elastic job: it returns the rank and the size of the present view.
// (torch's own asks its backend for them since 2.14; before, they are constant.) Owned by Python. Any thread.
#pragma once

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "engine/elastic_group.h"

namespace ringdp {

class LastingGroup final : public c10d::ProcessGroup {
 public:
  using c10d::ProcessGroup::ProcessGroup;

  int getRank() const override;
  int getSize() const override;

  void follow(const std::shared_ptr<ElasticGroup>& elastic);

 private:
  std::shared_ptr<ElasticGroup> elastic() const;

  mutable std::mutex mutex_;
  std::weak_ptr<ElasticGroup> elastic_;  // its backend's
};

}  // namespace ringdp
