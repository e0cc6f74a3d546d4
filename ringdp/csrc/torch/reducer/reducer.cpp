#include "torch/reducer/reducer.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "base/error.h"
#include "torch/backend/future_wait.h"
#include "torch/reducer/messages.h"

namespace ringdp {
namespace {

using torch::autograd::get_current_graph_task_id;

constexpr const char* kHooksBetweenSteps = "communication hooks are registered between steps, not during backward";

// The accumulators among `count` that a backward with chosen inputs (autograd.grad, backward(inputs=…)) will run.
bool any_accumulator_needed(const GradientHooks& hooks, std::size_t count) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  for (std::size_t i = 0; i < count; ++i) {
    const auto found = chosen->find(hooks.accumulator(i));
    if (found != chosen->end() && found->second.needed_) return true;
  }
  return false;
}

}  // namespace

Reducer::Reducer(std::vector<ModuleParameter> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options)
    : layout_(std::move(parameters), std::move(group), std::move(options), *this) {
  arrivals_.start(layout_.parameters.size());
  times_.count_kept(layout_.plan);
}

// ---- Forward.

// A forward that checkpointing repeats inside its backward: it does not begin a step.
bool Reducer::recomputing() const { return backward_.active() && get_current_graph_task_id() != -1; }

void Reducer::prepare_for_forward() {
  const Lock lock(mutex_);
  if (recomputing()) return;
  throw_if_failed();
  try {
    if (!layout_.local() && layout_.parameters.size() > 0)
      layout_.buckets.throw_if_failed(layout_.parameters.tensors().front().device().type());
  } catch (...) {
    failure_.keep(current_error_text());
    throw;
  }
  throw_if_unfinished(/*notify=*/true);
  try {
    if (!layout_.follow_requires_grad()) return;
  } catch (...) {
    failure_.keep(current_error_text());
    throw;
  }
  arrivals_.start(layout_.parameters.size());
  times_.count_kept(layout_.plan);
}

void Reducer::check_finalized() {
  const Lock lock(mutex_);
  throw_if_failed();
  throw_if_unfinished(/*notify=*/false);
}

void Reducer::throw_if_unfinished(bool notify) {
  if (!backward_.active()) return;
  const bool forbidden = layout_.options.unused == UnusedParameters::kForbidden;
  if (!arrivals_.static_graph() && !forbidden && arrivals_.sent() == 0)
    return backward_.end();  // nothing had left: as if it had never begun
  const std::vector<std::string>& names = layout_.parameters.names();
  UnfinishedBackward unfinished;
  unfinished.missing = arrivals_.unfinished();
  if (notify && backward_.peer_report().empty()) {
    backward_.set_peer_report(
        layout_.group.notify_others(unfinished_notice(backward_.step(), unfinished.missing, names),
                                    layout_.group.control_device(layout_.parameters.tensors().front())));
  }
  unfinished.step = backward_.step();
  unfinished.rank = layout_.group.rank();
  unfinished.ranks = layout_.group.ranks();
  unfinished.sent = arrivals_.sent();
  unfinished.sending = arrivals_.sending();
  unfinished.ended_short = backward_.ended_short();
  unfinished.static_graph = arrivals_.static_graph();
  unfinished.peer_report = backward_.peer_report();
  TORCH_CHECK(false, unfinished_text(unfinished, names));
}

bool Reducer::rebuild_buckets() {
  const Lock lock(mutex_);
  if (recomputing()) return false;
  if (backward_.active()) throw_if_unfinished(/*notify=*/false);
  if (!layout_.follow_learned_order()) return false;
  times_.count_kept(layout_.plan);
  return true;
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync) {
  const std::shared_ptr<void> due = std::make_shared<int>();
  {
    const Lock lock(mutex_);
    if (!layout_.hooks.attached() || layout_.parameters.size() == 0 || recomputing()) return;
    if (sync) throw_if_failed();
    layout_.allocate();
    if (sync) backward_.arm(due);
  }
  watch_outputs(shared_from_this(), outputs, sync, due);
}

void Reducer::demand_sync() {
  const Lock lock(mutex_);
  if (!layout_.hooks.attached() || layout_.parameters.size() == 0) return;
  throw_if_failed();
  layout_.allocate();
  backward_.demand();
}

// ---- Backward.

void Reducer::backward_began(bool sync) {
  const Lock lock(mutex_);
  if (!layout_.hooks.attached() || layout_.parameters.size() == 0 ||
      !any_accumulator_needed(layout_.hooks, layout_.parameters.size()))
    return;
  if (!sync && !backward_.demanded()) return backward_.stay_quiet(get_current_graph_task_id());
  if (!backward_.active()) begin();
}

void Reducer::begin() {
  throw_if_failed();
  layout_.allocate();
  backward_.begin();
  times_.begin();
  layout_.overflow.begin_backward();
  layout_.store.begin_backward();
  layout_.compression.begin_backward();
  join_.begin_backward();
  arrivals_.begin(join_.joining() ? layout_.store.size() : layout_.plan.kept());
  join_.divide();
  // The graph may be destroyed with its wrapper, so the callback holds the reducer weakly.
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    if (auto reducer = self.lock()) reducer->end_backward();
  });
  if (arrivals_.knows_graph()) {
    for (std::size_t i = 0; i < arrivals_.size(); ++i) {
      if (arrivals_.expected(i)) continue;
      write_to_bucket(i);
      mark_ready(i);
    }
  } else if (layout_.options.unused == UnusedParameters::kExpected && layout_.options.graph_shows_unused &&
             !arrivals_.static_graph()) {
    expect_only_what_the_graph_has();
  }
}

// The engine has listed the nodes that this backward will run.
void Reducer::expect_only_what_the_graph_has() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (nodes->count(layout_.hooks.accumulator(i)) > 0) continue;
    write_to_bucket(i);
    mark_ready(i);
  }
}

void Reducer::gradient_arrived_at(std::size_t position) {
  const Lock lock(mutex_);
  if (const auto parameter = layout_.parameters.since_construction(position)) gradient_arrived(*parameter);
}

void Reducer::gradient_arrived(std::size_t parameter) {
  const Lock lock(mutex_);
  if (!backward_.active()) {
    if (!backward_.synchronises(get_current_graph_task_id())) return layout_.store.set_left_over(parameter, true);
    begin();
  }
  const ModuleParameter& described = layout_.parameters[parameter];
  switch (arrivals_.arrived(parameter)) {
    case ArrivalTracker::Arrival::kOneOfSeveral:
      return;
    case ArrivalTracker::Arrival::kUnexpected:
      TORCH_CHECK(false, unexpected_text(described.name));
    case ArrivalTracker::Arrival::kTwice:
      TORCH_CHECK(false, marked_twice_text(parameter, described.name, described.used_in));
    case ArrivalTracker::Arrival::kComplete:
      write_to_bucket(parameter);
      mark_ready(parameter);
  }
}

// Its part of the bucket becomes this rank's gradient, or zeros if it has none. `late`: of a bucket that was to stay at home.
void Reducer::write_to_bucket(std::size_t parameter, bool late) {
  const bool used = layout_.parameters.tensors()[parameter].grad().defined();
  arrivals_.note_used(parameter, used);
  layout_.store.set_left_over(parameter, false);
  if (layout_.local()) return;
  if (!used && layout_.plan.bucket_of(parameter) >= arrivals_.sending() && !late)
    return;  // the bucket may stay at home
  layout_.store.write(parameter);
}

void Reducer::mark_ready(std::size_t parameter) {
  if (!arrivals_.mark_ready(parameter) || layout_.local()) return;
  while (const auto next = arrivals_.next_full()) launch(layout_.store[*next]);
}

void Reducer::launch(Bucket& bucket) {
  noting_failure(static_cast<int64_t>(bucket.index), bucket.name, [&] {
    if (bucket.marks.defined()) used_.write(bucket.marks);
    if (arrivals_.sent() == 0) times_.note_first_launch();
    arrivals_.note_sent(bucket.index);  // also where it fails: the others have seen this rank's part of it, or its end
    layout_.buckets.launch(bucket, backward_.step(), arrivals_.sending());
    // A hook's callbacks may issue further operations, at a different time on every rank.
    const bool last = bucket.index + 1 == arrivals_.sending();
    if (last && !layout_.calls_back() && layout_.sends_used_map()) used_.launch(/*with_input=*/true);
  });
}

// Runs `action`; its exception gets the operation's name, and the next forward throws its text.
template <class Action>
void Reducer::noting_failure(int64_t bucket, const std::string& name, Action&& action) {
  try {
    in_bucket(bucket, name, backward_.step(), std::forward<Action>(action));
  } catch (...) {
    std::string text = current_error_text();
    const Lock lock(mutex_);
    failure_.keep(std::move(text));
    throw;
  }
}

// ---- The end of backward. Callbacks of hooks may ask this reducer something, so nothing is waited for under the lock that
// a hook may have to end.

void Reducer::end_backward() {
  Lock lock(mutex_);
  if (!backward_.active()) return;
  const auto gradients_done = StepTimes::Clock::now();
  if (!arrivals_.complete(layout_.options.unused == UnusedParameters::kForbidden)) return backward_.end_short();
  std::vector<std::size_t> missing;
  int64_t missing_bytes = 0;
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (!arrivals_.ready(i)) write_to_bucket(i);
    if (arrivals_.used(i)) continue;
    missing.push_back(i);
    missing_bytes += static_cast<int64_t>(layout_.plan.gradients()[i].bytes());
  }
  arrivals_.graph_learned();
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (!arrivals_.ready(i)) mark_ready(i);
  }
  HookVerdicts hooks;
  if (!layout_.local()) {
    lock.unlock();
    wait_for_buckets(0, arrivals_.sending());
    lock.lock();
    noting_failure(-1, "which parameters were used", [&] {
      if (layout_.calls_back() && layout_.sends_used_map()) used_.launch(/*with_input=*/true);
      used_.end_backward(layout_.store[layout_.plan.kept() - 1].marks, !missing.empty() || layout_.may_skip(),
                         backward_.step(), join_.joining());
    });
    if (layout_.plan.kept() < layout_.store.size()) {
      send_late_buckets();
      lock.unlock();
      wait_for_buckets(arrivals_.sending(), layout_.store.size());
      lock.lock();
    }
    hooks = layout_.compression.used_hooks(layout_.store, backward_.step());
    lock.unlock();
    noting_failure(-1, "announced before", [&] { layout_.buckets.follow_announcements(backward_.step()); });
    GradientCompression::ask_hooks(hooks);
    lock.lock();
    layout_.overflow.collect(layout_.store, backward_.step(), hooks, /*look_at_results=*/!layout_.buckets.has_hook());
    layout_.compression.commit(layout_.store, backward_.step(), used_, layout_.overflow);
    hand_out();
    noting_failure(-1, "which ranks lack gradients", [&] { used_.warn(missing, backward_.step(), join_.joining()); });
  }
  for (auto& future : std::exchange(futures_, {})) {
    wait_until_complete(*future, std::chrono::milliseconds(0));
    future->wait();
  }
  times_.end(gradients_done, missing_bytes, layout_.local());
  backward_.end();
  if (!layout_.plan.order_known() && !layout_.local()) exchange_order();
  commit_hooks(std::move(lock), hooks);
}

void Reducer::wait_for_buckets(std::size_t first, std::size_t end) {
  for (std::size_t index = first; index < end; ++index) {
    Bucket& bucket = layout_.store[index];
    noting_failure(static_cast<int64_t>(index), bucket.name, [&] { layout_.buckets.wait(bucket); });
  }
}

// Sends the skipped buckets for which some rank has a gradient after all. All ranks have read the same map.
void Reducer::send_late_buckets() {
  times_.count_kept(layout_.plan);
  for (std::size_t index = layout_.plan.kept(); index < layout_.store.size(); ++index) {
    Bucket& bucket = layout_.store[index];
    const auto used = [&](std::size_t member) { return used_.somewhere().empty() || used_.somewhere()[member]; };
    const bool sent = index < arrivals_.sending();
    if (!sent && std::none_of(bucket.members.begin(), bucket.members.end(), used)) continue;
    times_.count_bucket(layout_.plan, index);
    if (sent) continue;
    for (std::size_t member : bucket.members) {
      if (!arrivals_.used(member)) write_to_bucket(member, /*late=*/true);
    }
    launch(bucket);
  }
}

void Reducer::hand_out() {
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (used_.used_somewhere(i)) layout_.store.hand_out(i, /*keep_none=*/arrivals_.used(i) || optimizer_in_backward_);
  }
  layout_.store.end_backward();
}

// All ranks take rank 0's order of arrival for the next plan, so that buckets fill up one after the other.
void Reducer::exchange_order() {
  if (layout_.parameters.size() == 0) return;
  const std::vector<bool> all_busy;
  const std::vector<int32_t> order =
      layout_.plan.order_to_send(arrivals_.order(), layout_.options.skip_unused ? used_.somewhere() : all_busy);
  std::vector<int32_t> sent;
  noting_failure(-1, "order of the gradients", [&] {
    const c10::Device device = layout_.group.control_device(layout_.parameters.tensors().front());
    sent = layout_.group.broadcast(order, device, "order of the gradients");
  });
  layout_.plan.learn(sent);
}

void Reducer::shadow_end_of_backward() {
  Lock lock(mutex_);
  HookVerdicts hooks = layout_.compression.used_hooks(layout_.store, backward_.step());
  lock.unlock();
  GradientCompression::ask_hooks(hooks);
  lock.lock();
  used_.forget();
  layout_.overflow.collect(layout_.store, backward_.step(), hooks, /*look_at_results=*/false);
  if (!layout_.plan.order_known() && !layout_.local()) exchange_order();
  commit_hooks(std::move(lock), hooks);
}

// The states that reductions which are hooks have kept count if all was finite.
void Reducer::commit_hooks(Lock lock, const HookVerdicts& hooks) {
  if (hooks.finite.empty()) return;
  const bool finite = layout_.overflow.finite().value_or(true);
  const GradientCompression::UnusedOf unused = layout_.compression.unused_of_hooks(used_);
  lock.unlock();
  GradientCompression::commit_hooks(hooks, finite, unused);
}

// ---- Between steps.

void Reducer::replace_parameters(std::vector<ModuleParameter> parameters) {
  ReductionPlan before;  // goes when the lock is free: Python is told
  const Lock lock(mutex_);
  throw_if_failed();
  throw_if_unfinished(/*notify=*/false);
  before = layout_.replace_parameters(std::move(parameters));
  used_.warn_again();
  arrivals_.start(layout_.parameters.size());
  times_.count_kept(layout_.plan);
}

void Reducer::refuse_change() const {
  throw_if_failed();
  backward_.refuse(
      "compression cannot change during a backward, nor after one that an exception left: change it between steps");
  if (!backward_.due()) return;
  throw Error(
      ErrorKind::kState,
      "compression cannot change between a forward and its backward: change it after backward, or let go of the "
      "forward's output");
}

void Reducer::set_reductions(ReductionPlan reductions) {
  ReductionPlan before;  // goes when the lock is free: Python is told
  const Lock lock(mutex_);
  refuse_change();
  layout_.check_reductions(reductions);
  before = layout_.set_reductions(std::move(reductions));
  times_.count_kept(layout_.plan);
}

void Reducer::choose(const std::vector<int>& reduction_of_bucket) {
  const Lock lock(mutex_);
  throw_if_failed();
  layout_between_steps("reductions of buckets cannot be chosen during a backward")->choose(reduction_of_bucket);
}

Reducer::Locked<GradientLayout> Reducer::layout_between_steps(const char* refusal) {
  Lock lock(mutex_);
  backward_.refuse(refusal);
  return {std::move(lock), layout_};
}

void Reducer::register_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  const Lock lock(mutex_);
  TORCH_CHECK(!backward_.active(), kHooksBetweenSteps);
  layout_.set_hook(std::move(hook));
}

void Reducer::register_builtin_hook(BuiltinHook which) {
  const Lock lock(mutex_);
  TORCH_CHECK(!backward_.active(), kHooksBetweenSteps);
  layout_.set_builtin_hook(which);
}

void Reducer::set_static_graph() {
  const Lock lock(mutex_);
  TORCH_CHECK(backward_.step() == 0,
              "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
              "constructed.");
  arrivals_.set_static_graph();
}

void Reducer::install_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  const Lock lock(mutex_);
  futures_.insert(futures_.end(), std::make_move_iterator(futures.begin()), std::make_move_iterator(futures.end()));
}

void Reducer::set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared) {
  const Lock lock(mutex_);
  const bool compressed = !layout_.compression.none();
  if (compressed) refuse_change();
  layout_.set_group(std::move(group), average, names_compared);
  if (compressed) times_.count_kept(layout_.plan);
}

void Reducer::reset() {
  const Lock lock(mutex_);
  failure_.clear();
  backward_.reset();
  layout_.plan.forget_learned();
  arrivals_.forget_graph();
  join_.forget_forward_work();
  used_.drop_operations();
  futures_.clear();
  for (Bucket& bucket : layout_.store) bucket.operation = {};
}

}  // namespace ringdp
