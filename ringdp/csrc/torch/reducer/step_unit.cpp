#include "torch/reducer/step_unit.h"

#include <string>

namespace ringdp {
namespace {

constexpr const char* kFeedbackLost = "what their error feedback held is lost with them";

}  // namespace

void StepUnit::make(Lock& lock, const BackwardEnd::Missing& missing, const std::function<void()>& reset) {
  const UnitScope scope;
  Order order;
  try {
    for (bool again = layout_.repair.must_send_again(); !try_once(lock, order, again);) again = true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMembership) failure_.keeping_in(-1, "the end of the step", [] { throw; });
    reset();
    in_bucket(-1, "the members of the group", backward_.step(), [] { throw; });
  }
  layout_.repair.accept();
  end_.learn_used(missing);
  end_.learn_order(order);
}

bool StepUnit::try_once(Lock& lock, Order& order, bool again) {
  ElasticGroup& elastic = layout_.repair.elastic();
  const uint64_t unit = elastic.begin_unit({.what = "step " + std::to_string(backward_.step()),
                                            .batches = true,
                                            .also_lost = layout_.compression.keeps_residuals() ? kFeedbackLost : ""});
  try {
    if (again) {
      report_.drop();  // it is told in the next window
      filler_.send_again();
    }
    elastic.know_weights(layout_.weights.of_members());
    const auto report = report_.under_way();
    lock.unlock();
    end_.wait_for_sent();
    if (report) failure_.keeping_in(-1, "step report", [&] { report->wait(); });
    end_.wait_for_used_map();
    lock.lock();
    order = end_.ask_for_order();
    lock.unlock();
    elastic.commit(unit);
    lock.lock();
    return true;
  } catch (const Error& error) {
    if (!is_loss(error)) throw;
  }
  if (lock.owns_lock()) lock.unlock();
  const bool counts = elastic.change(unit, layout_.repair.view()) == ElasticGroup::Outcome::kCounts;
  lock.lock();
  return counts;
}

}  // namespace ringdp
