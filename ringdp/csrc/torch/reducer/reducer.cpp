#include "torch/reducer/reducer.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "torch/backend/future_wait.h"
#include "torch/reducer/messages.h"

namespace ringdp {
namespace {

using torch::autograd::get_current_graph_task_id;

}  // namespace

Reducer::Reducer(std::vector<ModuleParameter> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options)
    : layout_(std::move(parameters), std::move(group), std::move(options), *this) {
  note_other_parameters();
}

// ---- Forward.

// A forward that checkpointing repeats inside its backward: it does not begin a step.
bool Reducer::recomputing() const { return backward_.active() && get_current_graph_task_id() != -1; }

void Reducer::prepare_for_forward() {
  const Lock lock(mutex_);
  if (recomputing()) return;
  guard_.throw_if_failed();
  guard_.keeping([&] { layout_.throw_if_group_failed(); });
  guard_.throw_if_unfinished(/*notify=*/true);
  if (guard_.keeping([&] { return layout_.follow_requires_grad(); })) note_other_parameters();
}

// Nothing has arrived of them.
void Reducer::note_other_parameters() {
  arrivals_.start(layout_.parameters.size());
  times_.count_kept(layout_.plan);
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
  if (!layout_.follow_learned_order()) return false;
  times_.count_kept(layout_.plan);
  return true;
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync) {
  std::shared_ptr<void> due;
  {
    const Lock lock(mutex_);
    if (!layout_.watched() || recomputing()) return;
    if (sync) guard_.throw_if_failed();
    layout_.allocate();
    due = std::make_shared<int>();
    if (sync) backward_.arm(due);
  }
  watch_outputs(shared_from_this(), outputs, sync, due);
}

void Reducer::demand_sync() {
  const Lock lock(mutex_);
  if (!layout_.watched()) return;
  guard_.throw_if_failed();
  layout_.allocate();
  backward_.demand();
}

// ---- Backward.

void Reducer::backward_began(bool sync) {
  const Lock lock(mutex_);
  if (!layout_.watched() || !layout_.hooks.any_runs()) return;
  if (!sync && !backward_.demanded()) return backward_.stay_quiet(get_current_graph_task_id());
  if (!backward_.active()) begin();
}

void Reducer::begin() {
  guard_.throw_if_failed();
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
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = weak_from_this(), pool = layout_.pool.during_backward()] {
        if (auto reducer = self.lock()) reducer->end_backward();
      });
  for (const std::size_t i : never_to_come()) {
    write_to_bucket(i);
    mark_ready(i);
  }
}

// The parameters of which it is known when a backward begins that no gradient will come.
std::vector<std::size_t> Reducer::never_to_come() const {
  if (arrivals_.knows_graph()) return arrivals_.unexpected();
  const bool shown = layout_.options.unused == UnusedParameters::kExpected && layout_.options.graph_shows_unused;
  return shown && !arrivals_.static_graph() ? layout_.hooks.not_in_graph() : std::vector<std::size_t>();
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
    guard_.keep(std::move(text));
    throw;
  }
}

// ---- The end of backward. It lets go of the lock wherever hooks or their callbacks may run, which may ask this reducer
// something.

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
  exchange_order();
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

void Reducer::exchange_order() {
  if (layout_.plan.order_known() || layout_.local() || layout_.parameters.size() == 0) return;
  std::vector<int32_t> order;
  noting_failure(-1, "order of the gradients",
                 [&] { order = layout_.exchange_order(arrivals_.order(), used_.somewhere()); });
  layout_.plan.learn(order);
}

void Reducer::shadow_end_of_backward() {
  Lock lock(mutex_);
  HookVerdicts hooks = layout_.compression.used_hooks(layout_.store, backward_.step());
  lock.unlock();
  GradientCompression::ask_hooks(hooks);
  lock.lock();
  used_.forget();
  layout_.overflow.collect(layout_.store, backward_.step(), hooks, /*look_at_results=*/false);
  exchange_order();
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
  guard_.throw_if_failed();
  guard_.throw_if_unfinished(/*notify=*/false);
  before = layout_.replace_parameters(std::move(parameters));
  used_.warn_again();
  note_other_parameters();
}

void Reducer::set_reductions(ReductionPlan reductions) {
  ReductionPlan before;  // goes when the lock is free: Python is told
  const Lock lock(mutex_);
  guard_.refuse_change_of_compression();
  layout_.check_reductions(reductions);
  before = layout_.set_reductions(std::move(reductions));
  times_.count_kept(layout_.plan);
}

Reducer::Locked<GradientLayout> Reducer::layout_between_steps(const char* refusal) {
  Lock lock(mutex_);
  guard_.refuse_in_backward(refusal);
  return {std::move(lock), layout_};
}

void Reducer::register_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  const Lock lock(mutex_);
  TORCH_CHECK(!backward_.active(), "communication hooks are registered between steps, not during backward");
  layout_.set_hook(std::move(hook));
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
  if (compressed) guard_.refuse_change_of_compression();
  layout_.set_group(std::move(group), average, names_compared);
  if (compressed) times_.count_kept(layout_.plan);
}

void Reducer::reset() {
  const Lock lock(mutex_);
  guard_.reset();
  backward_.reset();
  layout_.plan.forget_learned();
  arrivals_.forget_graph();
  join_.forget_forward_work();
  used_.drop_operations();
  futures_.clear();
  for (Bucket& bucket : layout_.store) bucket.operation = {};
}

}  // namespace ringdp
