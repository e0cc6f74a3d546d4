// GradientHooks: the hooks on the parameters' gradient accumulators, by which autograd reports each gradient to a
// GradientListener (the Reducer). Owned by the Reducer, attached and removed under its lock. Called by the threads
// that run backward, without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torch/reducer/forwards.h"

namespace ringdp {

class GradientListener {
 public:
  virtual ~GradientListener() = default;

  // Before autograd adds `gradient` to the parameter's .grad. Returns the tensor to add; undefined: none, the listener
  // has stored it.
  virtual at::Tensor take_gradient(std::size_t parameter, const at::Tensor& gradient) = 0;
  // After the gradient was put into .grad, by autograd or by take_gradient.
  virtual void gradient_arrived(std::size_t parameter) = 0;
  // Backward has reached an output of this forward.
  virtual void backward_began(Forward& forward) = 0;
  // gradient_arrived threw this.
  virtual void hook_failed(const std::string& text) = 0;
};

class GradientHooks {
 public:
  explicit GradientHooks(GradientListener& listener) : listener_(listener) {}
  ~GradientHooks() { detach(); }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Does nothing if they are attached, or were removed.
  void attach(const std::vector<at::Tensor>& parameters);
  void detach();
  void remove();  // for good
  bool attached() const { return attached_; }

  // Whether the present backward runs an accumulator. One with chosen inputs (autograd.grad, backward(inputs=…)) may
  // run none.
  bool any_runs() const;
  // The parameters whose accumulators are not in its graph; empty if the engine has not listed its nodes.
  std::vector<std::size_t> not_in_graph() const;
  // Whether another listener has or had hooks on the same parameter.
  bool shared(std::size_t parameter) const;

 private:
  using NodePointer = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Hooked {
    NodePointer accumulator;  // a tensor refers to its accumulator weakly
    torch::autograd::FunctionPreHook* before = nullptr;
    uintptr_t after = 0;
  };
  GradientListener& listener_;
  std::vector<Hooked> hooked_;
  bool attached_ = false;
  bool removed_ = false;
};

// Adds a node to the graph of `outputs`, which calls backward_began when a backward enters it, and owns `forward`. The
// outputs do not change.
void watch_outputs(const std::shared_ptr<GradientListener>& listener, const std::vector<at::Tensor>& outputs,
                   const std::shared_ptr<Forward>& forward);

}  // namespace ringdp
