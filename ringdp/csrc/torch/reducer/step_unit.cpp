#include "torch/reducer/step_unit.h"

#include <utility>

#include "torch/reducer/reducer.h"

namespace ringdp {

using Lock = Reducer::Lock;

int64_t StepUnit::number() {
  const Lock lock(reducer_.mutex_);
  return reducer_.backward_.step();
}

const char* StepUnit::also_lost() {
  const Lock lock(reducer_.mutex_);
  return reducer_.layout_.compression.keeps_residuals() ? "what their error feedback held is lost with them" : "";
}

bool StepUnit::must_send_again() {
  const Lock lock(reducer_.mutex_);
  return reducer_.layout_.repair.must_send_again();
}

void StepUnit::send_again() {
  const Lock lock(reducer_.mutex_);
  reducer_.report_.drop();  // it is reported in the next window
  reducer_.filler_.send_again();
}

std::vector<double> StepUnit::weights() {
  const Lock lock(reducer_.mutex_);
  return reducer_.layout_.weights.of_members();
}

void StepUnit::wait() {
  Lock lock(reducer_.mutex_);
  const auto report = reducer_.report_.under_way();
  lock.unlock();
  reducer_.end_.wait_for_sent();
  if (report) reducer_.failure_.keeping_in(-1, "step report", [&] { report->wait(); });
  reducer_.end_.wait_for_used_map();
  lock.lock();
  order_ = reducer_.end_.ask_for_order();
}

void StepUnit::counts() {
  HookVerdicts hooks;  // destroyed without the lock, since it calls Python
  Lock lock(reducer_.mutex_);
  reducer_.layout_.repair.accept();
  reducer_.end_.learn_used(reducer_.missing_);
  reducer_.end_.learn_order(std::exchange(order_, std::nullopt));
  reducer_.hand_out(std::move(lock), hooks);
}

void StepUnit::stopped() {
  try {
    throw;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMembership) reducer_.failure_.keeping_in(-1, "the end of the step", [] { throw; });
  } catch (...) {  // the exception names the step already
    reducer_.failure_.keeping([] { throw; });
  }
  reducer_.reset();  // the program may continue
  in_bucket(-1, "the members of the group", number(), [] { throw; });
  throw;
}

}  // namespace ringdp
