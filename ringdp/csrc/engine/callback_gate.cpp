#include "engine/callback_gate.h"

#include <chrono>
#include <utility>

namespace ringdp {
namespace {

constexpr auto kLongest = std::chrono::seconds(1);

std::shared_ptr<CallbackGate::State>& current_gate() {
  thread_local std::shared_ptr<CallbackGate::State> state;
  return state;
}

}  // namespace

CallbackGate::CallbackGate() : outer_(std::exchange(current_gate(), std::make_shared<State>())) {}

CallbackGate::~CallbackGate() { std::exchange(current_gate(), std::move(outer_))->release(); }

const std::shared_ptr<CallbackGate::State>& CallbackGate::current() { return current_gate(); }

void CallbackGate::State::release() {
  std::lock_guard lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

void CallbackGate::State::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kLongest, [this] { return over_; });
}

}  // namespace ringdp
