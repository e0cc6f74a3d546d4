#include "torch/reducer/reducer.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace ringdp {

using torch::autograd::get_current_graph_task_id;

// ---- Forward.

// Checkpointing repeats a forward inside its backward, which does not begin a step.
bool Reducer::recomputing() const { return backward_.active() && get_current_graph_task_id() != -1; }

void Reducer::prepare_for_forward() {
  const Lock lock(mutex_);
  if (recomputing()) return;
  guard_.throw_if_failed();
  failure_.keeping([&] { layout_.throw_if_group_failed(); });
  layout_.repair.follow_members();
  guard_.throw_if_unfinished(/*notify=*/true);
  between_steps_.follow_requires_grad();
}

void Reducer::called_in_backward() {
  if (layout_.repair.on()) layout_.repair.backward().called_in_backward(unit_);
}

void Reducer::check_finalized() {
  const Lock lock(mutex_);
  guard_.throw_if_failed();
  guard_.throw_if_unfinished(/*notify=*/false);
}

bool Reducer::rebuild_buckets() {
  const Lock lock(mutex_);
  if (recomputing()) return false;
  if (backward_.active()) guard_.throw_if_unfinished(/*notify=*/false);
  return between_steps_.follow_learned_order();
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync, std::optional<bool> training) {
  const auto forward = std::make_shared<Forward>();
  {
    const Lock lock(mutex_);
    if (!layout_.watched() || recomputing()) return;
    if (sync) guard_.throw_if_failed();
    layout_.allocate();
    forward->sync = sync;
    forward->weight = layout_.weights.of_forward();
    if (sync) backward_.arm(forward);
    if (sync && training) {
      forward->training = *training;
      const bool in_graph = std::any_of(outputs.begin(), outputs.end(), [](const at::Tensor& output) {
        return output.defined() && output.requires_grad();
      });
      if (in_graph || outputs.empty()) backward_.forwards().count(*forward, in_graph);
    }
  }
  watch_outputs(shared_from_this(), outputs, forward);
}

void Reducer::demand_sync() {
  const Lock lock(mutex_);
  if (!layout_.watched()) return;
  guard_.throw_if_failed();
  layout_.allocate();
  backward_.demand();
}

// ---- Backward.

void Reducer::backward_began(Forward& forward) {
  const Lock lock(mutex_);
  const double weight = forward.weight;
  const bool again = backward_.forwards().follow(forward);
  if (!layout_.watched() || !layout_.hooks.any_runs()) return;
  report_.backward_began();
  const bool averages = forward.sync || backward_.demanded();
  if (averages && !backward_.active()) return begin(weight, again);
  if (!averages && !backward_.quiet(get_current_graph_task_id())) {
    if (!backward_.active()) layout_.store.leave_kept_memory();
    backward_.stay_quiet(get_current_graph_task_id());
  }
  failure_.keeping_in(-1, "weights", [&] {
    backward_.active() ? layout_.weights.check_same(weight)
                       : layout_.weights.accumulate(get_current_graph_task_id(), weight);
  });
}

void Reducer::begin(double weight, bool again) {
  guard_.throw_if_failed();
  layout_.allocate();
  backward_.begin(again);
  times_.begin();
  report_.backward_began();
  layout_.overflow.begin_backward();
  layout_.store.begin_backward();
  layout_.repair.begin_step();
  layout_.compression.begin_backward();
  join_.begin_backward();
  // A rank that has run out of input (join), or is new, does not run the forwards of the others.
  backward_.forwards().set_comparable(!join_.joining() && !layout_.group.first_unit());
  arrivals_.begin(join_.joining() ? layout_.store.size() : layout_.plan.kept());
  join_.divide();
  failure_.keeping_in(-1, "weights",
                      [&] { layout_.weights.begin(get_current_graph_task_id(), weight, backward_.step()); });
  if (layout_.weights.unknown()) layout_.repair.withhold();
  failure_.keeping_in(-1, "step report", [&] { report_.exchange_if_due(join_.joining()); });
  const auto alive = std::make_shared<int>();
  if (layout_.repair.on()) layout_.repair.backward().begin({shared_from_this(), &unit_}, alive);
  // The graph may be destroyed with its wrapper, so the callback holds the reducer weakly.
  at_end_of_backward([self = weak_from_this(), alive, pool = layout_.pool.during_backward()] {
    if (auto reducer = self.lock()) reducer->end_backward();
  });
  filler_.begin();
}

void Reducer::gradient_arrived(std::size_t parameter) {
  const Lock lock(mutex_);
  if (!backward_.active()) {
    const int task = get_current_graph_task_id();
    if (!backward_.synchronises(task)) {
      report_.micro_batch_gradient();
      failure_.keeping_in(-1, "weights", [&] { layout_.weights.check_announced(layout_.parameters[parameter].name); });
      if (!layout_.left_over.any()) layout_.left_over.note_traffic(layout_.group.bytes_sent());
      return layout_.left_over.note(parameter, /*under_no_sync=*/backward_.quiet(task));
    }
    begin(layout_.weights.of_forward(), /*again=*/false);
  }
  filler_.arrived(parameter);
}

// ---- The end of backward. It releases the lock while hooks or their callbacks may run, which may call this reducer.

void Reducer::end_backward() {
  HookVerdicts hooks;  // destroyed without the lock, since it calls Python
  Lock lock(mutex_);
  const bool ends = backward_.active();
  const bool complete = ends && arrivals_.complete(layout_.options.unused == UnusedParameters::kForbidden);
  if (complete) {
    gradients_done_ = StepTimes::Clock::now();
    report_.computed(gradients_done_);
    missing_ = filler_.finish();
  } else if (ends) {
    backward_.end_short();
  }
  if (layout_.repair.on()) {
    lock.unlock();
    return layout_.repair.backward().end(unit_, complete);
  }
  if (!complete) return;
  if (!layout_.local()) wait_for_means(lock);
  hand_out(std::move(lock), hooks);
}

void Reducer::wait_for_means(Lock& lock) {
  const auto report = report_.under_way();
  lock.unlock();
  end_.wait_for_sent();
  if (report) failure_.keeping_in(-1, "step report", [&] { report->wait(); });
  lock.lock();
  end_.learn_used(missing_);
  if (!end_.may_send_late()) return;
  end_.send_late();
  lock.unlock();
  end_.wait_for_late();
  lock.lock();
}

void Reducer::hand_out(Lock lock, HookVerdicts& hooks) {
  if (!layout_.local()) {
    hooks = end_.used_hooks();
    lock.unlock();
    end_.ask_hooks(hooks);
    lock.lock();
    end_.hand_out(missing_, hooks);
  }
  end_.wait_for_futures();
  end_.count(gradients_done_, missing_);
  report_.finished(join_.joining());
  layout_.weights.end();
  backward_.end();
  backward_.forwards().settle();
  end_step(std::move(lock), hooks);
}

void Reducer::shadow_end_of_backward() {
  HookVerdicts hooks;  // destroyed without the lock, since it calls Python
  Lock lock(mutex_);
  hooks = end_.used_hooks();
  lock.unlock();
  hooks.ask();
  lock.lock();
  end_.shadow(hooks);
  end_step(std::move(lock), hooks);
}

// The states of hook reductions count if all results were finite.
void Reducer::end_step(Lock lock, HookVerdicts& hooks) {
  end_.learn_order(end_.ask_for_order());
  if (hooks.none()) return;
  const bool finite = layout_.overflow.finite().value_or(true);
  hooks.note_unused(layout_.reductions, layout_.parameters, used_);
  lock.unlock();
  hooks.commit(finite);
}

void Reducer::reset() {
  const Lock lock(mutex_);
  failure_.forget();
  backward_.reset();
  layout_.plan.forget_learned();
  arrivals_.forget_graph();
  join_.forget_forward_work();
  used_.drop_operations();
  end_.forget_futures();
  for (std::size_t index = 0; index < layout_.store.size(); ++index) layout_.store[index].operation = {};
}

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
