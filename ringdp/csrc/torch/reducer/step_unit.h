// StepUnit: the reducer's step in an elastic job, for the BackwardUnit that decides whether it counts: the step counts
// when all members have its means; if a member is lost before that, the survivors repeat the reduction from their
// gradients (StepRepair). Owned by the Reducer, whose lock its methods take; called without the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "torch/backend/backward_unit.h"

namespace ringdp {

class Reducer;

class StepUnit final : public BackwardUnit::Step {
 public:
  explicit StepUnit(Reducer& reducer) : reducer_(reducer) {}

  int64_t number() override;
  const char* also_lost() override;
  bool must_send_again() override;
  void send_again() override;
  std::vector<double> weights() override;
  void wait() override;
  void counts() override;
  [[noreturn]] void stopped() override;

 private:
  Reducer& reducer_;
  std::optional<std::vector<int32_t>> order_;  // BackwardEnd::ask_for_order
};

}  // namespace ringdp
