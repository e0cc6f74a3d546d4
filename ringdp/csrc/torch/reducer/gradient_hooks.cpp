#include "torch/reducer/gradient_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "torch/reducer/reducer_group.h"

namespace ringdp {
namespace {

using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

// A backward that is compiled as one graph does not run hooks.
void refuse_compiled_backward() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "RingDP's reducer does not work in a compiled backward (torch._dynamo.config.compiled_autograd), as little as "
      "DistributedDataParallel's: set torch._dynamo.config.optimize_ddp = \"python_reducer\" before wrapping "
      "the module, or leave compiled_autograd off");
}

class BeforeAccumulate final : public FunctionPreHook {
 public:
  BeforeAccumulate(GradientListener& listener, std::size_t parameter) : listener_(listener), parameter_(parameter) {}

  variable_list operator()(const variable_list& gradients) override {
    if (gradients.size() != 1) return gradients;
    at::Tensor to_add = listener_.take_gradient(parameter_, gradients[0]);
    if (to_add.is_same(gradients[0])) return gradients;
    return {std::move(to_add)};
  }
  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_backward(); }

  bool shared() const { return shared_.load(std::memory_order_relaxed); }
  void share() { shared_.store(true, std::memory_order_relaxed); }

 private:
  GradientListener& listener_;
  const std::size_t parameter_;
  std::atomic<bool> shared_{false};
};

class AfterAccumulate final : public FunctionPostHook {
 public:
  AfterAccumulate(GradientListener& listener, std::size_t parameter) : listener_(listener), parameter_(parameter) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    try {
      listener_.gradient_arrived(parameter_);
    } catch (...) {
      listener_.hook_failed(current_error_text());
      throw;
    }
    return outputs;
  }
  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_backward(); }

 private:
  GradientListener& listener_;
  const std::size_t parameter_;
};

class AtOutput final : public FunctionPreHook {
 public:
  AtOutput(std::weak_ptr<GradientListener> listener, std::shared_ptr<Forward> forward)
      : listener_(std::move(listener)), forward_(std::move(forward)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (auto listener = listener_.lock()) listener->backward_began(*forward_);
    return gradients;
  }
  void compiled_args(CompiledNodeArgs&) const override { refuse_compiled_backward(); }

 private:
  std::weak_ptr<GradientListener> listener_;  // a graph may outlive the wrapper
  const std::shared_ptr<Forward> forward_;    // by which the listener sees whether the graph still exists
};

}  // namespace

void GradientHooks::attach(const std::vector<at::Tensor>& parameters) {
  if (attached_ || removed_) return;
  attached_ = true;
  hooked_.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Hooked hooked;
    hooked.accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
    auto before = std::make_unique<BeforeAccumulate>(listener_, i);
    for (const auto& other : hooked.accumulator->pre_hooks()) {
      if (auto* theirs = dynamic_cast<BeforeAccumulate*>(other.get())) {
        theirs->share();
        before->share();
      }
    }
    hooked.before = before.get();
    hooked.accumulator->add_pre_hook(std::move(before));
    hooked.after = hooked.accumulator->add_post_hook(std::make_unique<AfterAccumulate>(listener_, i));
    hooked_.push_back(std::move(hooked));
  }
}

void GradientHooks::detach() {
  for (Hooked& hooked : hooked_) {
    auto& before = hooked.accumulator->pre_hooks();
    std::erase_if(before, [&](const auto& hook) { return hook.get() == hooked.before; });
    hooked.accumulator->del_post_hook(hooked.after);
  }
  hooked_.clear();
  attached_ = false;
}

void GradientHooks::remove() {
  detach();
  removed_ = true;
}

bool GradientHooks::any_runs() const {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return !hooked_.empty();
  return std::any_of(hooked_.begin(), hooked_.end(), [&](const Hooked& hooked) {
    const auto found = chosen->find(hooked.accumulator.get());
    return found != chosen->end() && found->second.needed_;
  });
}

std::vector<std::size_t> GradientHooks::not_in_graph() const {
  std::vector<std::size_t> result;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  for (std::size_t i = 0; nodes != nullptr && i < hooked_.size(); ++i) {
    if (nodes->count(hooked_[i].accumulator.get()) == 0) result.push_back(i);
  }
  return result;
}

bool GradientHooks::shared(std::size_t parameter) const {
  return parameter < hooked_.size() && static_cast<const BeforeAccumulate*>(hooked_[parameter].before)->shared();
}

void watch_outputs(const std::shared_ptr<GradientListener>& listener, const std::vector<at::Tensor>& outputs,
                   const std::shared_ptr<Forward>& forward) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined()) continue;
    if (const auto& node = output.grad_fn()) node->add_pre_hook(std::make_unique<AtOutput>(listener, forward));
  }
}

}  // namespace ringdp
