#include "torch/reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "torch/reducer_errors.h"

namespace ringdp {
namespace {

// From here on a copy costs more than an operation of its own.
constexpr std::size_t kDirectBytes = std::size_t{4} << 20;

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

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<bool> sparse,
                 c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      options_(std::move(options)),
      exchange_(std::move(group), options_.average),
      group_size_(exchange_.ranks()) {
  TORCH_CHECK(names_.size() == parameters_.size() && sparse.size() == parameters_.size(),
              "one name and one sparse flag per parameter");
  slots_.resize(parameters_.size());
  items_.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    slots_[i].parameter = parameter;
    slots_[i].sparse = sparse[i];
    const c10::Device device = parameter.device();
    items_[i].group = (static_cast<uint64_t>(device.type()) << 32) |
                      (static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16) |
                      static_cast<uint64_t>(parameter.scalar_type());
    items_[i].numel = static_cast<std::size_t>(parameter.numel());
    items_[i].element_bytes = parameter.element_size();
    items_[i].alone = sparse[i] || items_[i].numel * items_[i].element_bytes >= kDirectBytes;
  }
  std::vector<std::size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  plan(order);
  if (watches()) hooks_ = std::make_unique<GradientHooks>(*this, parameters_);
}

Reducer::~Reducer() = default;

void Reducer::plan(std::span<const std::size_t> order) {
  layout_ = assign_buckets(items_, order, options_.caps_bytes);
  // Which parameters were used travels behind the gradients of the last bucket, so that is one with memory of its own.
  const auto shared = [&](const auto& members) { return !items_[members.front()].alone; };
  const auto last = std::find_if(layout_.rbegin(), layout_.rend(), shared);
  if (last != layout_.rend()) std::rotate(last.base() - 1, last.base(), layout_.end());
  stats_.buckets = static_cast<int64_t>(layout_.size());
  stats_.bytes = 0;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    if (!slots_[i].sparse) stats_.bytes += static_cast<int64_t>(items_[i].numel * items_[i].element_bytes);
  }
}

// At the first forward that needs it, not at construction: a hook may still be registered, and evaluation needs none.
void Reducer::allocate() {
  if (!buckets_.empty() || local()) return;
  const bool marks = options_.unused != UnusedParameters::kForbidden && !exchange_.has_hook();
  std::vector<Bucket> buckets(layout_.size());
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    Bucket& bucket = buckets[index];
    bucket.index = index;
    bucket.members = layout_[index];
    bucket.plan = plan_bucket(items_, bucket.members);
    bucket.name = describe_bucket(index, bucket.members, names_);
    bucket.pending = bucket.members.size();
    bucket.sparse = slots_[bucket.members.front()].sparse;
    const bool marked = marks && index + 1 == buckets.size();
    bucket.direct = !bucket.sparse && !marked && items_[bucket.members.front()].alone;
    const bool owned = !bucket.sparse && !bucket.direct;
    if (owned) allocate_bucket(bucket, parameters_[bucket.members.front()], marked ? parameters_.size() : 0);
    for (std::size_t position = 0; position < bucket.members.size(); ++position) {
      Slot& slot = slots_[bucket.members[position]];
      slot.bucket = index;
      slot.direct = bucket.direct;
      if (owned) slot.view = gradient_view(bucket, position, slot.parameter);
    }
  }
  buckets_ = std::move(buckets);
}

void Reducer::drop_memory() {
  buckets_.clear();
  for (Slot& slot : slots_) slot.view.reset();
}

void Reducer::throw_if_failed() const {
  if (failed_.empty()) return;
  ErrorContext context;
  context.cause = failed_;
  context.advice = "the ranks no longer agree: leave the process group and restart from a checkpoint";
  throw Error(ErrorKind::kState, "reducing gradients failed in step " + std::to_string(step_) + ": " + failed_,
              context);
}

void Reducer::prepare_for_forward() {
  const Lock lock(mutex_);
  throw_if_failed();
  throw_if_unfinished();
}

void Reducer::check_finalized() {
  const Lock lock(mutex_);
  throw_if_failed();
  throw_if_unfinished();
}

bool Reducer::rebuild_buckets() {
  const Lock lock(mutex_);
  if (active_) throw_if_unfinished();
  if (!next_order_) return false;
  const std::vector<std::size_t> order = *std::exchange(next_order_, std::nullopt);
  const auto before = std::exchange(layout_, {});
  plan(order);
  if (layout_ != before) drop_memory();
  rebuilt_ = true;
  return true;
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, bool sync) {
  if (hooks_ == nullptr) return;
  {
    const Lock lock(mutex_);
    if (sync) throw_if_failed();
    allocate();
    if (sync) armed_ = true;
  }
  watch_outputs(shared_from_this(), outputs, sync);
}

void Reducer::backward_began(bool sync) {
  const Lock lock(mutex_);
  if (hooks_ == nullptr || !any_accumulator_needed(*hooks_, slots_.size())) return;
  if (!sync) {
    quiet_task_ = torch::autograd::get_current_graph_task_id();
    return;
  }
  if (!active_) begin();
}

void Reducer::begin() {
  throw_if_failed();
  allocate();
  active_ = true;
  armed_ = false;
  ++step_;
  next_bucket_ = 0;
  began_ = Clock::now();
  arrival_order_.clear();
  for (Bucket& bucket : buckets_) bucket.pending = bucket.members.size();
  for (Slot& slot : slots_) {
    slot.ready = slot.used = slot.copy_back = false;
    slot.arrivals_left = slot.arrivals;
  }
  if (auto work = std::exchange(forward_work_, nullptr)) {
    work->wait();
    exchange_.set_divisor(divide_by_all_ranks_ ? group_size_ : work->result()[0].item<int64_t>());
  } else {
    exchange_.set_divisor(0);
  }
  // A graph that is destroyed with its wrapper must not find it gone.
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    if (auto reducer = std::static_pointer_cast<Reducer>(self.lock())) reducer->end_backward();
  });
  if (learned_graph_) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].arrivals > 0) continue;
      settle(i);
      mark_ready(i);
    }
  } else if (options_.unused == UnusedParameters::kExpected && options_.graph_shows_unused && !static_graph_) {
    expect_only_what_the_graph_has();
  }
}

// The engine has listed the nodes that this backward will run.
void Reducer::expect_only_what_the_graph_has() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (nodes->count(hooks_->accumulator(i)) == 0) {
      settle(i);
      mark_ready(i);
    }
  }
}

bool Reducer::take_gradient(std::size_t parameter, const at::Tensor& gradient) {
  Slot& slot = slots_[parameter];
  if ((!slot.view.defined() && !slot.direct) || !gradient.defined() || c10::GradMode::is_enabled()) return false;
  if (gradient.layout() != at::kStrided || gradient.unsafeGetTensorImpl()->is_python_dispatch() ||
      gradient.scalar_type() != slot.parameter.scalar_type()) {
    return false;
  }
  at::Tensor& grad = slot.parameter.mutable_grad();
  if (grad.defined() || !slot.parameter.requires_grad()) return false;
  if (torch::autograd::impl::post_acc_grad_hooks(slot.parameter) != nullptr)
    return false;  // they want autograd to do it
  if (slot.direct) {
    // As autograd would, but without the reference it keeps for the hooks that follow.
    if (held_elsewhere(gradient) || !torch::autograd::utils::obeys_layout_contract(gradient, slot.parameter))
      return false;
    grad = gradient.detach();
    return true;
  }
  if (held_elsewhere(slot.view)) renew_view(slot);
  copy_gradient(slot.view, gradient);
  grad = slot.view;
  return true;
}

// Somebody kept the last .grad: it stays theirs, with its values.
void Reducer::renew_view(Slot& slot) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor kept = slot.view;
  const Bucket& bucket = buckets_[slot.bucket];
  const auto position = std::find_if(bucket.members.begin(), bucket.members.end(),
                                     [&](std::size_t member) { return &slots_[member] == &slot; });
  slot.view = gradient_view(bucket, static_cast<std::size_t>(position - bucket.members.begin()), slot.parameter);
  const at::Tensor copy = kept.clone();
  kept.set_(copy.storage(), 0, copy.sizes(), copy.strides());
}

void Reducer::gradient_arrived(std::size_t parameter) {
  const Lock lock(mutex_);
  if (!active_) {
    if (!armed_ || torch::autograd::get_current_graph_task_id() == quiet_task_) return;
    begin();
  }
  Slot& slot = slots_[parameter];
  if (learning_graph()) {
    if (slot.arrivals++ == 0) arrival_order_.push_back(parameter);
    return;
  }
  if (learned_graph_) {
    TORCH_CHECK(slot.arrivals_left > 0,
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                "but then got used in the second iteration. this is not compatible with static_graph set to True. "
                "Parameter: ",
                names_[parameter]);
    if (--slot.arrivals_left > 0) return;
  }
  if (slot.ready) throw_marked_twice(parameter);
  arrival_order_.push_back(parameter);
  settle(parameter);
  mark_ready(parameter);
}

// The parameter's part of the bucket holds what this rank has to give.
void Reducer::settle(std::size_t parameter) {
  Slot& slot = slots_[parameter];
  at::Tensor& grad = slot.parameter.mutable_grad();
  slot.used = grad.defined();
  if (local()) return;
  Bucket& bucket = buckets_[slot.bucket];
  if (slot.sparse) {
    if (grad.defined()) {
      TORCH_CHECK(grad.is_sparse(), "Expected variable to have sparse gradient: ", names_[parameter]);
      bucket.buffer = grad;
    } else {
      bucket.buffer = at::sparse_coo_tensor(slot.parameter.sizes(), slot.parameter.options().layout(at::kSparse));
    }
    return;
  }
  if (bucket.direct) {
    settle_direct(slot, bucket);
  } else if (!grad.defined()) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (held_elsewhere(slot.view)) renew_view(slot);
    slot.view.zero_();
  } else if (grad.unsafeGetTensorImpl() != slot.view.unsafeGetTensorImpl()) {
    adopt(slot, grad);
  }
  remember_stream(bucket);
}

void Reducer::settle_direct(Slot& slot, Bucket& bucket) {
  at::Tensor& grad = slot.parameter.mutable_grad();
  bucket.buffer = bucket.gradients = as_buffer(grad, slot.parameter);
  if (bucket.buffer.defined()) return;
  allocate_bucket(bucket, slot.parameter, 0);
  slot.view = gradient_view(bucket, 0, slot.parameter);
  if (grad.defined()) adopt(slot, grad);
}

void Reducer::adopt(Slot& slot, at::Tensor& gradient) {
  if (held_elsewhere(slot.view)) renew_view(slot);
  copy_gradient(slot.view, gradient);
  if (gradient.requires_grad()) {
    slot.copy_back = true;  // create_graph: what comes later differentiates through it
  } else {
    gradient = slot.view;
  }
}

void Reducer::mark_ready(std::size_t parameter) {
  Slot& slot = slots_[parameter];
  slot.ready = true;
  if (local()) return;
  Bucket& bucket = buckets_[slot.bucket];
  if (--bucket.pending == 0 && !learning_graph()) launch_full_buckets();
}

void Reducer::launch_full_buckets() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) {
    Bucket& bucket = buckets_[next_bucket_];
    try {
      in_bucket(static_cast<int64_t>(bucket.index), bucket.name, step_, [&] {
        if (bucket.marks.defined()) {
          at::AutoDispatchBelowADInplaceOrView below_autograd;
          bucket.marks.fill_(1);
          for (std::size_t i = 0; i < slots_.size(); ++i) {
            if (!slots_[i].used) bucket.marks.select(0, static_cast<int64_t>(i)).zero_();
          }
        }
        ++next_bucket_;  // also where it fails: the others have seen this rank's part of it, or its end
        exchange_.launch(bucket, buckets_.size(), parameters_);
        if (next_bucket_ == buckets_.size() && sends_used_map()) launch_used_map();
      });
    } catch (...) {
      if (failed_.empty()) failed_ = current_error_text();
      throw;
    }
  }
}

void Reducer::throw_marked_twice(std::size_t parameter) const {
  TORCH_CHECK(
      false,
      "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
      "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not "
      "shared across multiple concurrent forward-backward passes. or try to use _set_static_graph() as a "
      "workaround if this module graph does not change during training loop. "
      "2) Reused parameters in multiple reentrant backward passes. For example, if you use multiple `checkpoint` "
      "functions to wrap the same part of your model, it would result in the same set of parameters been used by "
      "different reentrant backward passes multiple times, and hence marking a variable ready multiple times. "
      "Pass static_graph=True if the graph stays the same during training, or use_reentrant=False.\n"
      "Parameter at index ",
      parameter, " with name ", names_[parameter],
      " has been marked as ready twice. This means that multiple autograd engine hooks have fired for this "
      "particular parameter during this iteration.");
}

}  // namespace ringdp
