#include "torch/reducer/reducer.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/reducer/reducer_errors.h"

namespace ringdp {
namespace {

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
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      plan_(options_.caps_bytes),
      store_(parameters_, plan_, hooks_, options_.own_gradients),
      group_(std::move(group), options_.average, options_.names_compared, options_.host_control) {
  start();
}

Reducer::~Reducer() = default;

// A forward that checkpointing repeats inside its backward: it does not begin a step.
bool Reducer::recomputing() const { return backward_.active() && torch::autograd::get_current_graph_task_id() != -1; }

void Reducer::prepare_for_forward() {
  const Lock lock(mutex_);
  if (recomputing()) return;
  failure_.throw_if_failed(backward_.step());
  try {
    if (!local() && !parameters_.tensors().empty())
      bucket_reducer_.throw_if_failed(parameters_.tensors().front().device().type());
  } catch (...) {
    failure_.keep(current_error_text());
    throw;
  }
  throw_if_unfinished(/*notify=*/true);
  follow_requires_grad();
}

void Reducer::check_finalized() {
  const Lock lock(mutex_);
  failure_.throw_if_failed(backward_.step());
  throw_if_unfinished(/*notify=*/false);
}

bool Reducer::rebuild_buckets() {
  const Lock lock(mutex_);
  if (recomputing()) return false;
  if (backward_.active()) throw_if_unfinished(/*notify=*/false);
  const std::optional<bool> changed = plan_.follow_learned();
  if (!changed) return false;
  planned_anew();
  if (*changed) store_.drop();
  return true;
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync) {
  if (!hooks_.attached() || parameters_.size() == 0) return;
  const std::shared_ptr<void> due = std::make_shared<int>();
  {
    const Lock lock(mutex_);
    if (recomputing()) return;
    if (sync) failure_.throw_if_failed(backward_.step());
    allocate();
    if (sync) {
      backward_.arm(due);
    }
  }
  watch_outputs(shared_from_this(), outputs, sync, due);
}

void Reducer::demand_sync() {
  const Lock lock(mutex_);
  if (!hooks_.attached() || parameters_.size() == 0) return;
  failure_.throw_if_failed(backward_.step());
  allocate();
  backward_.demand();
}

void Reducer::backward_began(bool sync) {
  const Lock lock(mutex_);
  if (!hooks_.attached() || parameters_.size() == 0 || !any_accumulator_needed(hooks_, parameters_.size())) return;
  if (!sync && !backward_.demanded()) {
    backward_.stay_quiet(torch::autograd::get_current_graph_task_id());
    return;
  }
  if (!backward_.active()) begin();
}

void Reducer::begin() {
  failure_.throw_if_failed(backward_.step());
  allocate();
  backward_.begin();
  began_ = Clock::now();
  stats_.began_ns = nanoseconds(began_);
  stats_.launched_ns = 0;
  finite_.reset();
  flags_.clear();
  own_non_finite_ = -1;
  store_.begin_backward();
  auto work = std::exchange(forward_work_, nullptr);
  joining_ = work != nullptr;
  arrivals_.begin(joining_ ? store_.size() : plan_.kept());
  bucket_reducer_.set_loss_scale(residual_scale());
  if (work) {
    work->wait();
    divide_by(divide_by_all_ranks_ ? group_.ranks() : work->result()[0].item<int64_t>());
  } else {
    divide_by(0);
  }
  // The graph may be destroyed with its wrapper, so the callback holds the reducer weakly.
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    if (auto reducer = std::static_pointer_cast<Reducer>(self.lock())) reducer->end_backward();
  });
  if (arrivals_.knows_graph()) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (arrivals_.expected(i)) continue;
      write_to_bucket(i);
      mark_ready(i);
    }
  } else if (options_.unused == UnusedParameters::kExpected && options_.graph_shows_unused &&
             !arrivals_.static_graph()) {
    expect_only_what_the_graph_has();
  }
}

// The engine has listed the nodes that this backward will run.
void Reducer::expect_only_what_the_graph_has() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (nodes->count(hooks_.accumulator(i)) == 0) {
      write_to_bucket(i);
      mark_ready(i);
    }
  }
}

void Reducer::gradient_arrived_at(std::size_t parameter) {
  const Lock lock(mutex_);
  if (const auto now = parameters_.since_construction(parameter)) gradient_arrived(*now);
}

void Reducer::gradient_arrived(std::size_t parameter) {
  const Lock lock(mutex_);
  if (!backward_.active()) {
    if (!backward_.synchronises(torch::autograd::get_current_graph_task_id())) {
      store_.set_left_over(parameter, true);
      return;
    }
    begin();
  }
  switch (arrivals_.arrived(parameter)) {
    case ArrivalTracker::Arrival::kOneOfSeveral:
      return;
    case ArrivalTracker::Arrival::kUnexpected:
      TORCH_CHECK(
          false,
          "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
          "but then got used in the second iteration. this is not compatible with static_graph set to True. "
          "Parameter: ",
          parameters_.names()[parameter]);
    case ArrivalTracker::Arrival::kTwice:
      throw_marked_twice(parameter);
    case ArrivalTracker::Arrival::kComplete:
      write_to_bucket(parameter);
      mark_ready(parameter);
  }
}

// Its part of the bucket becomes this rank's gradient, or zeros if it has none.
void Reducer::write_to_bucket(std::size_t parameter, bool late) {
  const bool used = parameters_.tensors()[parameter].grad().defined();
  arrivals_.note_used(parameter, used);
  store_.set_left_over(parameter, false);
  if (local()) return;
  if (!used && plan_.bucket_of(parameter) >= arrivals_.sending() && !late) return;  // the bucket may stay at home
  store_.write(parameter);
}

void Reducer::mark_ready(std::size_t parameter) {
  if (arrivals_.mark_ready(parameter) && !local()) launch_full_buckets();
}

void Reducer::launch_full_buckets() {
  while (const auto next = arrivals_.next_full()) launch(store_[*next]);
}

void Reducer::launch(Bucket& bucket) {
  try {
    in_bucket(static_cast<int64_t>(bucket.index), bucket.name, backward_.step(), [&] {
      if (bucket.marks.defined()) used_.write(bucket.marks);
      if (arrivals_.sent() == 0) stats_.launched_ns = nanoseconds(Clock::now());
      arrivals_.note_sent(
          bucket.index);  // also where it fails: the others have seen this rank's part of it, or its end
      bucket.sent_in = backward_.step();
      list_sections(bucket, bucket.buffer, /*with_residuals=*/true);
      if (has_residual(bucket)) add_residual(bucket);
      take_flag(bucket);
      bucket_reducer_.launch(bucket, arrivals_.sending(), parameters_.tensors());
      // A hook's callbacks may issue further operations, at a different time on every rank.
      const bool last = bucket.index + 1 == arrivals_.sending();
      if (last && !calls_back() && sends_used_map()) used_.launch(/*with_input=*/true);
    });
  } catch (...) {
    failure_.keep(current_error_text());
    throw;
  }
}

void Reducer::hook_failed(const std::string& text) { note_error(text); }

}  // namespace ringdp
