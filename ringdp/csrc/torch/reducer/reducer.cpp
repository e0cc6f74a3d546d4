#include "torch/reducer/reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

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
      group_(std::move(group), options_.average, options_.names_compared, options_.host_control) {
  take_trainable();
  plan_.start(describe_gradients());
  planned_anew();
  set_hooks();
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
  if (*changed) drop_memory();
  return true;
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync) {
  if (hooks_ == nullptr || gradient_states_.empty()) return;
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
  if (hooks_ == nullptr || gradient_states_.empty()) return;
  failure_.throw_if_failed(backward_.step());
  allocate();
  backward_.demand();
}

void Reducer::backward_began(bool sync) {
  const Lock lock(mutex_);
  if (hooks_ == nullptr || gradient_states_.empty() || !any_accumulator_needed(*hooks_, gradient_states_.size()))
    return;
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
  for (GradientState& gradient_state : gradient_states_) gradient_state.copy_back = false;
  auto work = std::exchange(forward_work_, nullptr);
  joining_ = work != nullptr;
  arrivals_.begin(joining_ ? buckets_.size() : plan_.kept());
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
    for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
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
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    if (nodes->count(hooks_->accumulator(i)) == 0) {
      write_to_bucket(i);
      mark_ready(i);
    }
  }
}

bool Reducer::take_gradient(std::size_t parameter, const at::Tensor& gradient) {
  GradientState& gradient_state = gradient_states_[parameter];
  if ((!gradient_state.view.defined() && !gradient_state.direct) || gradient_state.cast || !gradient.defined() ||
      c10::GradMode::is_enabled()) {
    return false;
  }
  if (gradient.layout() != at::kStrided || gradient.unsafeGetTensorImpl()->is_python_dispatch() ||
      gradient.scalar_type() != gradient_state.parameter.scalar_type()) {
    return false;
  }
  at::Tensor& grad = gradient_state.parameter.mutable_grad();
  if (grad.defined() || !gradient_state.parameter.requires_grad() || owns_gradient(parameter)) return false;
  if (torch::autograd::impl::post_acc_grad_hooks(gradient_state.parameter) != nullptr)
    return false;  // they want autograd to do it
  if (gradient_state.direct) {
    // As autograd would, but without the reference it keeps for the hooks that follow.
    if (held_elsewhere(gradient) || !torch::autograd::utils::obeys_layout_contract(gradient, gradient_state.parameter))
      return false;
    grad = gradient.detach();
    return true;
  }
  if (held_elsewhere(gradient_state.view)) renew_view(gradient_state);
  copy_gradient(gradient_state.view, gradient);
  grad = gradient_state.view;
  return true;
}

// Whether .grad has memory of its own: by option, or because another wrapper reduces the same parameter at the same time.
bool Reducer::owns_gradient(std::size_t parameter) const { return options_.own_gradients || hooks_->shared(parameter); }

// The program has kept the last .grad: that tensor keeps its memory and its values, and the bucket gets a new view.
void Reducer::renew_view(GradientState& gradient_state) {
  at::Tensor kept = gradient_state.view;
  const Bucket& bucket = buckets_[plan_.bucket_of(static_cast<std::size_t>(&gradient_state - gradient_states_.data()))];
  const auto position = std::find_if(bucket.members.begin(), bucket.members.end(),
                                     [&](std::size_t member) { return &gradient_states_[member] == &gradient_state; });
  gradient_state.view =
      gradient_view(bucket, static_cast<std::size_t>(position - bucket.members.begin()), gradient_state.parameter);
  leave_bucket(kept);
}

void Reducer::gradient_arrived_at(std::size_t parameter) {
  const Lock lock(mutex_);
  if (const auto now = parameters_.since_construction(parameter)) gradient_arrived(*now);
}

void Reducer::gradient_arrived(std::size_t parameter) {
  const Lock lock(mutex_);
  if (!backward_.active()) {
    if (!backward_.synchronises(torch::autograd::get_current_graph_task_id())) {
      gradient_states_[parameter].local = true;
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

// Writes this rank's gradient to its part of the bucket: zeros if it has none, nothing where .grad already is that part.
void Reducer::write_to_bucket(std::size_t parameter, bool late) {
  GradientState& gradient_state = gradient_states_[parameter];
  at::Tensor& grad = gradient_state.parameter.mutable_grad();
  const bool used = grad.defined();
  arrivals_.note_used(parameter, used);
  gradient_state.local = false;
  if (local()) return;
  Bucket& bucket = buckets_[plan_.bucket_of(parameter)];
  if (!used && bucket.index >= arrivals_.sending() && !late) return;  // the bucket may stay at home
  if (gradient_state.sparse) {
    if (grad.defined()) {
      TORCH_CHECK(grad.is_sparse(), "Expected variable to have sparse gradient: ", parameters_.names()[parameter]);
      bucket.buffer = owns_gradient(parameter) ? grad.clone() : grad;
    } else {
      bucket.buffer = at::sparse_coo_tensor(gradient_state.parameter.sizes(),
                                            gradient_state.parameter.options().layout(at::kSparse));
    }
    return;
  }
  give_memory(bucket);
  if (bucket.direct) {
    write_direct(parameter, bucket);
  } else if (!grad.defined()) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (held_elsewhere(gradient_state.view)) renew_view(gradient_state);
    gradient_state.view.zero_();
  } else if (grad.unsafeGetTensorImpl() != gradient_state.view.unsafeGetTensorImpl() || owns_gradient(parameter)) {
    adopt(parameter, grad);
  }
  remember_stream(bucket);
}

void Reducer::write_direct(std::size_t parameter, Bucket& bucket) {
  GradientState& gradient_state = gradient_states_[parameter];
  at::Tensor& grad = gradient_state.parameter.mutable_grad();
  const bool in_place = !hooks_->shared(parameter);
  bucket.buffer = bucket.gradients = in_place ? as_buffer(grad, gradient_state.parameter) : at::Tensor();
  if (bucket.buffer.defined()) return;
  allocate_bucket(bucket, gradient_state.parameter.device(), 0);
  gradient_state.view = gradient_view(bucket, 0, gradient_state.parameter);
  if (grad.defined()) adopt(parameter, grad);
}

void Reducer::adopt(std::size_t parameter, at::Tensor& gradient) {
  GradientState& gradient_state = gradient_states_[parameter];
  if (held_elsewhere(gradient_state.view)) renew_view(gradient_state);
  copy_gradient(gradient_state.view, gradient);
  if (gradient.requires_grad() || gradient_state.cast || owns_gradient(parameter)) {
    gradient_state.copy_back = true;  // create_graph: what comes later differentiates through it
  } else {
    gradient = gradient_state.view;
  }
}

void Reducer::mark_ready(std::size_t parameter) {
  if (arrivals_.mark_ready(parameter) && !local()) launch_full_buckets();
}

void Reducer::launch_full_buckets() {
  while (const auto next = arrivals_.next_full()) launch(buckets_[*next]);
}

void Reducer::launch(Bucket& bucket) {
  try {
    in_bucket(static_cast<int64_t>(bucket.index), bucket.name, backward_.step(), [&] {
      if (bucket.marks.defined()) write_marks(bucket.marks);
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
      if (last && !calls_back() && sends_used_map()) launch_used_map(/*with_input=*/true);
    });
  } catch (...) {
    failure_.keep(current_error_text());
    throw;
  }
}

void Reducer::hook_failed(const std::string& text) { note_error(text); }

}  // namespace ringdp
