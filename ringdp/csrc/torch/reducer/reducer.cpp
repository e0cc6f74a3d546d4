#include "torch/reducer/reducer.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "base/error.h"

namespace ringdp {
namespace {

constexpr const char* kHookAndCompression =
    "a communication hook and compression both say how buckets are reduced: use one of them (compressors can be "
    "communication hooks too)";

}  // namespace

using torch::autograd::get_current_graph_task_id;

// The reducer's step in an elastic job, for the BackwardUnit that decides whether it counts: the step counts when all
// members have its means; if a member is lost before that, the survivors repeat the reduction from their gradients
// (StepRepair). Owned by the Reducer, whose lock its methods take; called without the GIL, between `begin` and the end
// of a step.
class Reducer::Unit final : public BackwardUnit::Step {
 public:
  explicit Unit(Reducer& reducer) : reducer_(reducer) {}

  int64_t number() override {
    const Lock lock(reducer_.mutex_);
    return reducer_.exchange_.step;
  }
  const char* also_lost() override {
    const Lock lock(reducer_.mutex_);
    return reducer_.exchange_.compression.keeps_residuals() ? "what their error feedback held is lost with them" : "";
  }
  bool must_send_again() override {
    const Lock lock(reducer_.mutex_);
    return reducer_.buckets_.repair.must_send_again();
  }
  std::vector<double> weights() override {
    const Lock lock(reducer_.mutex_);
    return reducer_.exchange_.weights.of_members();
  }
  void send_again() override {
    const Lock lock(reducer_.mutex_);
    present()->send_again();
  }
  void wait() override {
    Lock lock(reducer_.mutex_);
    const auto step = present();
    step->wait_for_members(lock);
  }
  void counts() override {
    HookVerdicts hooks;  // destroyed without the lock, since it calls Python
    Lock lock(reducer_.mutex_);
    const auto step = present();
    step->accept();
    reducer_.hand_out(step, lock, hooks);
    if (lock.owns_lock()) lock.unlock();
    if (reducer_.when_counted_) reducer_.when_counted_();
  }
  [[noreturn]] void stopped() override {
    StepFailure& failure = reducer_.exchange_.failure;
    try {
      throw;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kMembership) failure.keeping_in(-1, "the end of the step", [] { throw; });
    } catch (...) {  // the exception names the step already
      failure.keeping([] { throw; });
    }
    reducer_.reset();  // the program may continue
    in_bucket(-1, "the members of the group", number(), [] { throw; });
    throw;
  }

 private:
  std::shared_ptr<ringdp::Step> present() const {
    if (!reducer_.step_) throw Error(ErrorKind::kState, "the reducer was reset while its step was not over");
    return reducer_.step_;
  }

  Reducer& reducer_;
};

Reducer::Reducer(std::vector<ModuleParameter> parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options)
    : group_(std::move(group), options.average, options.names_compared, options.host_control),
      plan_(std::move(parameters), std::move(options), group_),
      exchange_(group_, plan_, mutex_),
      buckets_(plan_, exchange_, *this),
      report_(plan_, exchange_, buckets_.store),
      join_(plan_, exchange_, buckets_),
      unit_(std::make_shared<Unit>(*this)) {
  report_.count_kept();
}

// ---- Forward.

// Checkpointing repeats a forward inside its backward, which does not begin a step.
bool Reducer::recomputing() const { return step_ && get_current_graph_task_id() != -1; }

void Reducer::prepare_for_forward() {
  const Lock lock(mutex_);
  if (recomputing()) return;
  exchange_.failure.throw_if_any();
  exchange_.failure.keeping([&] { exchange_.throw_if_group_failed(); });
  buckets_.repair.follow_members();
  throw_if_unfinished(/*notify=*/true);
  exchange_.failure.keeping([&] { follow_requires_grad(); });
}

void Reducer::called_in_backward() {
  if (buckets_.repair.on()) buckets_.repair.backward().called_in_backward(*unit_);
}

void Reducer::check_finalized() {
  const Lock lock(mutex_);
  exchange_.failure.throw_if_any();
  throw_if_unfinished(/*notify=*/false);
}

bool Reducer::rebuild_buckets() {
  const Lock lock(mutex_);
  if (recomputing()) return false;
  throw_if_unfinished(/*notify=*/false);
  if (!buckets_.follow_learned_order()) return false;
  report_.count_kept();
  return true;
}

void Reducer::announce_weight(double weight, bool sync, std::optional<bool> training) {
  const Lock lock(mutex_);
  if (plan_.parameters.size() == 0) return;
  buckets_.repair.follow_members();
  const bool discarded = exchange_.weights.accumulated() && buckets_.left_over.none();
  const bool compared = training && !buckets_.repair.on();
  const std::string note = compared ? exchange_.forwards.note_of(*training) : std::string();
  const auto announce = [&] { exchange_.weights.announce(weight, sync, discarded, note); };
  sync ? exchange_.failure.keeping(announce) : announce();
}

void Reducer::repeat_batch() {
  const Lock lock(mutex_);
  exchange_.weights.repeat();
  exchange_.forwards.settle();
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync, std::optional<bool> training) {
  const auto forward = std::make_shared<Forward>();
  {
    const Lock lock(mutex_);
    if (!buckets_.watched() || recomputing()) return;
    if (sync) exchange_.failure.throw_if_any();
    buckets_.allocate();
    forward->sync = sync;
    forward->weight = exchange_.weights.of_forward();
    if (sync) demand_.arm(forward);
    if (sync && training) {
      forward->training = *training;
      const bool in_graph = std::any_of(outputs.begin(), outputs.end(), [](const at::Tensor& output) {
        return output.defined() && output.requires_grad();
      });
      if (in_graph || outputs.empty()) exchange_.forwards.count(*forward, in_graph);
    }
  }
  watch_outputs(shared_from_this(), outputs, forward);
}

void Reducer::demand_sync() {
  const Lock lock(mutex_);
  if (!buckets_.watched()) return;
  exchange_.failure.throw_if_any();
  buckets_.allocate();
  demand_.demand();
}

// ---- Backward.

void Reducer::backward_began(Forward& forward) {
  const Lock lock(mutex_);
  const double weight = forward.weight;
  const bool again = exchange_.forwards.follow(forward);
  if (!buckets_.watched() || !buckets_.hooks.any_runs()) return;
  report_.backward_began();
  const bool averages = forward.sync || demand_.demanded();
  if (averages && !step_) return begin(weight, again);
  const int task = get_current_graph_task_id();
  if (!averages && !demand_.quiet(task)) {
    if (!step_) buckets_.store.leave_kept_memory();
    demand_.stay_quiet(task);
  }
  exchange_.failure.keeping_in(-1, "weights", [&] {
    step_ ? exchange_.weights.check_same(weight) : exchange_.weights.accumulate(task, weight);
  });
}

void Reducer::begin(double weight, bool again) {
  exchange_.failure.throw_if_any();
  buckets_.allocate();
  demand_.settle();
  ++exchange_.step;
  exchange_.forwards.begin(again);
  const bool joining = join_.counts();
  const auto step = step_ = std::make_shared<Step>(plan_, exchange_, buckets_, report_, joining);
  report_.step_began();
  exchange_.overflow.begin_backward();
  buckets_.store.begin_backward();
  buckets_.repair.begin_step();
  exchange_.compression.begin_backward();
  // A rank that has run out of input (join), or is new, does not run the forwards of the others.
  exchange_.forwards.set_comparable(!joining && !group_.first_unit());
  join_.divide();
  exchange_.failure.keeping_in(-1, "weights",
                               [&] { exchange_.weights.begin(get_current_graph_task_id(), weight, exchange_.step); });
  if (exchange_.weights.unknown()) buckets_.repair.withhold();
  exchange_.failure.keeping_in(-1, "step report", [&] { report_.exchange_if_due(joining); });
  const auto alive = std::make_shared<int>();
  if (buckets_.repair.on()) buckets_.repair.backward().begin({shared_from_this(), unit_.get()}, alive);
  // The graph may be destroyed with its wrapper, so the callback holds the reducer weakly.
  at_end_of_backward([self = weak_from_this(), alive, pool = buckets_.pool.during_backward()] {
    if (auto reducer = self.lock()) reducer->end_backward();
  });
  step->begin();
}

void Reducer::gradient_arrived(std::size_t parameter) {
  const Lock lock(mutex_);
  if (!step_) {
    const int task = get_current_graph_task_id();
    if (!demand_.synchronises(task)) {
      report_.micro_batch_gradient();
      exchange_.failure.keeping_in(-1, "weights",
                                   [&] { exchange_.weights.check_announced(plan_.parameters[parameter].name); });
      if (!buckets_.left_over.any()) buckets_.left_over.note_traffic(group_.bytes_sent());
      return buckets_.left_over.note(parameter, /*under_no_sync=*/demand_.quiet(task));
    }
    begin(exchange_.weights.of_forward(), /*again=*/false);
  }
  step_->arrived(parameter);
}

void Reducer::install_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  const Lock lock(mutex_);
  futures_.insert(futures_.end(), std::make_move_iterator(futures.begin()), std::make_move_iterator(futures.end()));
}

// ---- The end of backward.

void Reducer::end_backward() {
  HookVerdicts hooks;  // destroyed without the lock, since it calls Python
  Lock lock(mutex_);
  const std::shared_ptr<Step> step = step_;
  const bool complete = step && step->complete();
  if (complete) step->finish();
  if (buckets_.repair.on()) {
    lock.unlock();
    return buckets_.repair.backward().end(*unit_, complete);
  }
  if (!complete) return;
  if (!exchange_.local()) step->wait_for_means(lock);
  hand_out(step, lock, hooks);
}

void Reducer::hand_out(const std::shared_ptr<Step>& step, Lock& lock, HookVerdicts& hooks) {
  if (!exchange_.local()) step->hand_out(lock, hooks, optimizer_in_backward_);
  step->wait_for_futures(std::exchange(futures_, {}));
  exchange_.weights.end();
  last_order_ = step->order();
  if (step_ == step) step_ = nullptr;
  exchange_.forwards.settle();
  step->learn_order();
  if (hooks.none()) return;
  const bool finite = exchange_.overflow.finite().value_or(true);
  step->note_unused(hooks);
  lock.unlock();
  hooks.commit(finite);
}

void Reducer::shadow_end_of_backward() {
  HookVerdicts hooks;  // destroyed without the lock, since it calls Python
  Lock lock(mutex_);
  hooks = HookVerdicts(plan_.reductions, buckets_.store, exchange_.step);
  lock.unlock();
  hooks.ask();
  lock.lock();
  exchange_.overflow.collect(buckets_.store, exchange_.step, hooks, /*look_at_results=*/false);
  const std::vector<int32_t> order = exchange_.ask_for_order(last_order_, {});
  if (!order.empty()) plan_.buckets.learn(order);
  const bool finite = exchange_.overflow.finite().value_or(true);
  lock.unlock();
  hooks.commit(finite);
}

// ---- Between two steps.

void Reducer::throw_if_unfinished(bool notify) {
  if (!step_) return;
  if (plan_.graph.on || plan_.required() || step_->sent() > 0) step_->throw_unfinished(notify);
  step_ = nullptr;
  exchange_.forwards.abandon();
}

void Reducer::refuse_in_backward(const char* refusal) const {
  if (step_) throw Error(ErrorKind::kState, refusal);
}

void Reducer::refuse_change_of_compression() const {
  exchange_.failure.throw_if_any();
  refuse_in_backward(
      "compression cannot change during a backward, nor after one that an exception left: change it between steps");
  if (!demand_.due()) return;
  throw Error(
      ErrorKind::kState,
      "compression cannot change between a forward and its backward: change it after backward, or let go of the "
      "forward's output");
}

// The parameters are other ones.
void Reducer::start() {
  buckets_.start();
  last_order_.clear();
  report_.count_kept();
}

// Plans anew if parameters were frozen or unfrozen since the last plan, or got other data. Throws on all ranks if they
// do not agree about that.
void Reducer::follow_requires_grad() {
  const bool changed = plan_.parameters.changed();
  // All ranks replace data at the same place of the program, and their modules were equal.
  if (!changed && !buckets_.store.other_data()) return;
  Plan::check_gradient_dtypes(plan_.parameters.all());
  const std::vector<std::size_t> frozen = plan_.parameters.frozen();
  std::vector<std::pair<std::size_t, Bucket>> means;
  const auto agree = [&] {
    means.clear();
    if (group_.ranks() == 1 && !buckets_.repair.on()) return;
    buckets_.average_left_over(plan_.parameters.agree_about_change(group_, buckets_.left_over.by_param_index()), means);
  };
  if (changed) buckets_.repair.as_unit("the agreement on frozen parameters", agree);
  for (const auto& [parameter, mean] : means) buckets_.left_over.accept(parameter, mean);
  for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
    if (std::binary_search(frozen.begin(), frozen.end(), plan_.parameters.param_index(i))) buckets_.store.release(i);
  }
  plan_.parameters.accept();
  start();
}

ReductionPlan Reducer::replace_parameters(std::vector<ModuleParameter> others) {
  const Lock lock(mutex_);
  exchange_.failure.throw_if_any();
  throw_if_unfinished(/*notify=*/false);
  Plan::check_gradient_dtypes(others);
  std::unordered_set<const c10::TensorImpl*> staying;
  for (const ModuleParameter& one : others) staying.insert(one.tensor.unsafeGetTensorImpl());
  for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
    if (!staying.contains(plan_.parameters.tensors()[i].unsafeGetTensorImpl())) buckets_.store.release(i);
  }
  plan_.parameters = TrainableParameters(std::move(others));
  ReductionPlan before = exchange_.compression.clear();  // reductions and residuals are of the old parameters
  exchange_.overflow.watch_for_compression(false);
  start();
  exchange_.used.warned = false;
  return before;
}

void Reducer::check_reductions(const ReductionPlan& reductions) const {
  if (!reductions.reductions.empty() && exchange_.buckets.has_hook())
    throw Error(ErrorKind::kState, kHookAndCompression);
  plan_.reductions.check(reductions);
}

void Reducer::set_reductions(ReductionPlan& reductions) {
  const Lock lock(mutex_);
  refuse_change_of_compression();
  check_reductions(reductions);
  reductions = exchange_.compression.set(std::move(reductions));
  exchange_.overflow.watch_for_compression(!plan_.reductions.none());
  buckets_.lay_out_again();
  report_.count_kept();
}

void Reducer::choose(const std::vector<int>& reduction_of_bucket) {
  const Lock lock(mutex_);
  exchange_.failure.throw_if_any();
  refuse_in_backward("reductions of buckets cannot be chosen during a backward");
  buckets_.choose(reduction_of_bucket);
}

void Reducer::register_hook(std::unique_ptr<c10d::CommHookInterface>&& hook) {
  const Lock lock(mutex_);
  TORCH_CHECK(!step_, "communication hooks are registered between steps, not during backward");
  if (!plan_.reductions.none()) throw Error(ErrorKind::kState, kHookAndCompression);
  exchange_.buckets.set_hook(std::move(hook));
  buckets_.store.drop();  // buckets for hooks have no marks, and a world of one has no buckets
  buckets_.attach();
}

void Reducer::set_static_graph() {
  const Lock lock(mutex_);
  TORCH_CHECK(exchange_.step == 0,
              "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
              "constructed.");
  plan_.graph.on = true;
}

void Reducer::set_group(c10::intrusive_ptr<c10d::ProcessGroup> other, bool average, bool names_compared) {
  const Lock lock(mutex_);
  const bool compressed = !plan_.reductions.none();
  if (compressed) refuse_change_of_compression();
  exchange_.forwards.settle();
  const bool other_size = group_.replace(std::move(other), average, names_compared);
  exchange_.buckets.group_replaced();
  if (compressed) {
    check_reductions(plan_.reductions.all());
    if (other_size) exchange_.compression.clear_residuals();  // other ranks own the parts now
    buckets_.lay_out_again();
    report_.count_kept();
  }
  buckets_.attach();
}

void Reducer::begin_again(int64_t step) {
  const Lock lock(mutex_);
  exchange_.failure.throw_if_any();
  throw_if_unfinished(/*notify=*/false);
  exchange_.forwards.settle();
  buckets_.repair.follow_members();
  exchange_.step = step;
  report_.go_on_from(step);
  start();
}

void Reducer::set_optimizer_in_backward() {
  const Lock lock(mutex_);
  optimizer_in_backward_ = true;
}

Reducer::Locked<GradientCompression> Reducer::residuals(const char* refusal) {
  Lock lock(mutex_);
  refuse_in_backward(refusal);
  buckets_.repair.follow_members();
  return {std::move(lock), exchange_.compression};
}

void Reducer::zero_gradients() {
  const Lock lock(mutex_);
  buckets_.store.zero_gradients();
  buckets_.left_over.forget();
}

void Reducer::reset() {
  const Lock lock(mutex_);
  exchange_.failure.forget();
  step_ = nullptr;
  demand_.settle();
  exchange_.forwards.settle();
  plan_.buckets.forget_learned();
  plan_.graph.forget(plan_.parameters.size());
  join_.forget_forward_work();
  exchange_.used.before = nullptr;
  futures_.clear();
  for (std::size_t index = 0; index < buckets_.store.size(); ++index) buckets_.store[index].operation = {};
}

std::vector<std::size_t> Reducer::arrivals() {
  const Lock lock(mutex_);
  return step_ ? step_->order() : last_order_;
}

void Reducer::note_thrown(std::string text) {
  const Lock lock(mutex_);
  thrown_ = std::move(text);
}

std::string Reducer::thrown() {
  const Lock lock(mutex_);
  return thrown_;
}

}  // namespace ringdp
