#include "engine/hold.h"

#include <chrono>
#include <utility>

namespace ringdp {
namespace {

constexpr auto kLongest = std::chrono::seconds(1);

std::shared_ptr<CallbackHold::State>& slot() {
  thread_local std::shared_ptr<CallbackHold::State> state;
  return state;
}

}  // namespace

CallbackHold::CallbackHold() : outer_(std::exchange(slot(), std::make_shared<State>())) {}

CallbackHold::~CallbackHold() { std::exchange(slot(), std::move(outer_))->release(); }

const std::shared_ptr<CallbackHold::State>& CallbackHold::current() { return slot(); }

void CallbackHold::State::release() {
  std::lock_guard lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

void CallbackHold::State::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kLongest, [this] { return over_; });
}

}  // namespace ringdp
