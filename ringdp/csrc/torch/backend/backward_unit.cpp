#include "torch/backend/backward_unit.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "meet/store.h"

namespace ringdp {
namespace {

using torch::autograd::get_current_graph_task_id;

UnitDescription describe_unit(const std::vector<std::shared_ptr<BackwardUnit::Step>>& steps) {
  UnitDescription unit;
  unit.batches = true;
  std::vector<std::string> numbers;
  for (const auto& step : steps) {
    numbers.push_back(std::to_string(step->number()));
    if (unit.also_lost.empty()) unit.also_lost = step->also_lost();
  }
  const bool same = std::all_of(numbers.begin(), numbers.end(), [&](const auto& it) { return it == numbers.front(); });
  unit.what = same ? "step " + numbers.front() : "the backward of steps " + join(numbers, ", ");
  return unit;
}

}  // namespace

void at_end_of_backward(std::function<void()> run) {
  torch::autograd::Engine::get_default_engine().queue_callback([run = std::move(run)] {
    torch::PyWarningHandler warnings;  // its destructor throws if a filter turns a warning into an error
    try {
      run();
    } catch (...) {
      warnings.set_in_exception();
      throw;
    }
  });
}

void BackwardUnit::begin(const std::shared_ptr<Step>& step, const std::shared_ptr<void>& alive) {
  const std::lock_guard lock(mutex_);
  forget_orphans();
  std::erase_if(open_, [&](const Open& it) { return it.id == step.get(); });
  open_.push_back({step.get(), true, step, alive, get_current_graph_task_id(), std::this_thread::get_id()});
}

void BackwardUnit::end(const Step& step, bool complete) {
  Steps steps;
  {
    const std::lock_guard lock(mutex_);
    for (Open& it : open_)
      if (it.id == &step) it.ended = true;
    if (!complete) std::erase_if(open_, [&](const Open& it) { return it.id == &step; });
    steps = take_ended();
  }
  make(steps);
}

void BackwardUnit::called_in_backward(const Step& step) {
  const int task = get_current_graph_task_id();
  Steps steps;
  {
    const std::lock_guard lock(mutex_);
    const auto waits = [&](const Open& it) { return it.id == &step && it.ended; };
    if (std::any_of(open_.begin(), open_.end(), waits)) steps = take_what_has_ended();
    const auto holds = [&](const Open& it) { return it.task == task && !it.is_step && !it.alive.expired(); };
    if (std::none_of(open_.begin(), open_.end(), holds)) {
      auto alive = std::make_shared<int>();
      open_.push_back({alive.get(), false, {}, alive, task, std::this_thread::get_id()});
      at_end_of_backward([self = weak_from_this(), alive] {
        if (const auto unit = self.lock()) unit->release(alive.get());
      });
    }
  }
  make(steps);
}

void BackwardUnit::release(const void* alive) {
  Steps steps;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(open_, [&](const Open& it) { return it.id == alive; });
    steps = take_ended();
  }
  make(steps);
}

BackwardUnit::Steps BackwardUnit::take_ended() {
  const int task = get_current_graph_task_id();
  const auto thread = std::this_thread::get_id();
  const auto open = [&](const Open& it) { return it.with(task, thread) && !it.ended && !it.alive.expired(); };
  return std::any_of(open_.begin(), open_.end(), open) ? Steps() : take_what_has_ended();
}

BackwardUnit::Steps BackwardUnit::take_what_has_ended() {
  const int task = get_current_graph_task_id();
  const auto thread = std::this_thread::get_id();
  Steps steps;
  std::erase_if(open_, [&](const Open& it) {
    if (!it.ended || !it.with(task, thread)) return false;
    if (auto step = it.step.lock()) steps.push_back(std::move(step));
    return true;
  });
  return steps;
}

// An exception has ended the backward for whose end they wait: their reducers report it in the next forward.
void BackwardUnit::forget_orphans() {
  std::erase_if(open_, [](const Open& it) { return !it.ended && it.alive.expired(); });
  std::erase_if(open_, [this](const Open& it) {
    return it.ended && std::none_of(open_.begin(), open_.end(),
                                    [&](const Open& other) { return !other.ended && other.with(it.task, it.thread); });
  });
}

void BackwardUnit::make(const Steps& steps) {
  if (steps.empty()) return;
  try {
    elastic_->run_unit([&] { return describe_unit(steps); }, [&](bool again) { reduce(steps, again); });
  } catch (...) {
    const UnitScope scope;
    for (std::size_t i = 1; i < steps.size(); ++i) {
      try {
        steps[i]->stopped();
      } catch (...) {  // the first exception is thrown
      }
    }
    steps.front()->stopped();
  }
  std::exception_ptr failure;
  for (const auto& step : steps) {
    try {
      step->counts();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void BackwardUnit::reduce(const Steps& steps, bool again) {
  again = again || std::any_of(steps.begin(), steps.end(), [](const auto& step) { return step->must_send_again(); });
  if (again)
    for (const auto& step : steps) step->send_again();
  for (const auto& step : steps) {
    const std::vector<double> weights = step->weights();
    if (weights.empty()) continue;
    elastic_->set_weights(weights);
    break;
  }
  for (const auto& step : steps) step->wait();
}

}  // namespace ringdp
