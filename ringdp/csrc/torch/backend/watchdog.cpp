#include "torch/backend/watchdog.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "torch/backend/future_wait.h"
#include "torch/backend/process_group.h"
#include "torch/bindings/bindings.h"

namespace ringdp {
namespace {

// A foreign backend may notice the end of a connection before ring does.
constexpr std::chrono::milliseconds kCauseGrace{1500};
constexpr std::chrono::seconds kLongestAbort{10};

std::string text_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown error";
  }
}

// A backend that failed is not destroyed: where torch's watchdog of NCCL has seen the failure before the abort, it
// sleeps for a minute and then ends the process, and the destructor would wait for it.
void keep_for_ever(const c10::intrusive_ptr<c10d::Backend>& backend) {
  [[maybe_unused]] auto* kept = new c10::intrusive_ptr<c10d::Backend>(backend);
}

}  // namespace

BackendWatchdog::BackendWatchdog(std::shared_ptr<GroupHandle> group, c10::intrusive_ptr<c10d::Backend> foreign)
    : group_(std::move(group)), state_(std::make_shared<State>()), foreign_(std::move(foreign)) {
  state_->name = foreign_->getBackendName();
  thread_ = start_thread("ringdp-watchdog", [state = state_, foreign = foreign_] { run(state, foreign); });
  listener_ = std::make_shared<const FailureListener>([state = state_, foreign = foreign_](const auto& failure) {
    std::lock_guard lock(state->mutex);
    if (!state->failure) keep_for_ever(foreign);
    state->failure = failure;
    state->changed.notify_all();
  });
  group_->on_failure(listener_);
}

BackendWatchdog::~BackendWatchdog() {
  if (fork_generation() == generation_) {
    close();
    return;
  }
  // The thread exists in the parent only, and may have held the mutex during the fork.
  [[maybe_unused]] auto* thread = thread_.release();
  [[maybe_unused]] auto* state = new std::shared_ptr<State>(state_);
  [[maybe_unused]] auto* foreign = new c10::intrusive_ptr<c10d::Backend>(foreign_);
}

void BackendWatchdog::run(const std::shared_ptr<State>& state, const c10::intrusive_ptr<c10d::Backend>& foreign) {
  std::unique_lock lock(state->mutex);
  state->changed.wait(lock, [&] { return state->stopping || state->failure; });
  if (state->failure && !state->stopping) {
    const std::string cause = text_of(state->failure);
    lock.unlock();
    // The log line comes before the abort, which may end the process (torch's watchdog of NCCL) or only show as wrong
    // numbers.
    log(LogLevel::kError, "aborting " + state->name + ", which would wait for ever: " + cause);
    try {
      foreign->abort();
    } catch (const std::exception& error) {
      log(LogLevel::kWarning, "aborting " + state->name + " failed: " + error.what());
    }
    lock.lock();
    state->aborted = true;
  }
  state->ended = true;
  state->changed.notify_all();
}

void BackendWatchdog::close() {
  if (!thread_ || fork_generation() != generation_) return;
  listener_.reset();
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, kLongestAbort, [&] { return state_->ended; });
  lock.unlock();
  if (!ended && thread_->joinable()) thread_->detach();  // inside an abort() that does not return: it shares the state
  end_thread(thread_);
  thread_.reset();
}

std::shared_ptr<Work> BackendWatchdog::announce(Announcement what) {
  what.by = state_->name;
  std::shared_ptr<Work> work = group_->announce(what, {});
  std::lock_guard lock(announced_mutex_);
  while (!announced_.empty() && announced_.front()->finished()) announced_.pop_front();
  announced_.push_back(work);
  return work;
}

void BackendWatchdog::wait(Work& announcement) { group_->wait(announcement); }

void BackendWatchdog::drain() {
  if (fork_generation() != generation_) return;
  std::deque<std::shared_ptr<Work>> announced;
  {
    std::lock_guard lock(announced_mutex_);
    announced.swap(announced_);
  }
  for (const auto& work : announced) {
    try {
      group_->wait(*work);
    } catch (const Error& error) {
      return log(LogLevel::kDebug, std::string("leaving a group: ") + error.what());
    }
  }
}

std::exception_ptr BackendWatchdog::failure_within(std::chrono::milliseconds time) const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, time, [&] { return state_->failure != nullptr; });
  return state_->failure;
}

void BackendWatchdog::throw_if_failed() const {
  if (const auto failure = failure_within(std::chrono::milliseconds(0))) std::rethrow_exception(failure);
}

void BackendWatchdog::wait_for(const std::function<c10::intrusive_ptr<c10::ivalue::Future>()>& future_of) const {
  try {
    const auto future = future_of();
    wait_until_complete_or_failed(*future);
    if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  } catch (...) {
    if (const auto failure = failure_within(kCauseGrace)) std::rethrow_exception(failure);  // it names the guilty rank
    throw;
  }
  throw_if_failed();
}

void BackendWatchdog::wait_until_complete_or_failed(c10::ivalue::Future& future) const {
  if (future.completed()) return;
  future.addCallback(
      [state = state_](c10::ivalue::Future&) {
        std::lock_guard lock(state->mutex);
        state->changed.notify_all();
      },
      /*uses_future=*/false);
  std::unique_lock lock(state_->mutex);
  while (!future.completed()) {
    if (state_->failure) std::rethrow_exception(state_->failure);
    if (state_->changed.wait_for(lock, kInterruptPeriod) == std::cv_status::no_timeout) continue;
    lock.unlock();
    group_->engine()->check_interrupt();
    lock.lock();
  }
}

bool BackendWatchdog::failed() const { return failure_within(std::chrono::milliseconds(0)) != nullptr; }

bool BackendWatchdog::aborted() const {
  std::lock_guard lock(state_->mutex);
  return state_->aborted;
}

std::shared_ptr<BackendWatchdog> watchdog_of(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto types = group.getDeviceTypes();
  const auto is = [&](const c10::Device& type) { return type.type() == device; };
  if (std::none_of(types.begin(), types.end(), is) || ring_of(group, device) != nullptr) return nullptr;
  for (const c10::Device& type : types) {
    if (ProcessGroupRing* ring = ring_of(group, type.type())) return ring->watchdog(group.getBackend(device));
  }
  return nullptr;
}

namespace {

namespace py = pybind11;

std::vector<std::shared_ptr<BackendWatchdog>> watch_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::vector<std::shared_ptr<BackendWatchdog>> watchdogs;
  for (const c10::Device& type : group->getDeviceTypes())
    if (auto watchdog = watchdog_of(*group, type.type())) watchdogs.push_back(std::move(watchdog));
  return watchdogs;
}

// For tests: any backend beside any ring.
std::shared_ptr<BackendWatchdog> watch_backend(const c10::intrusive_ptr<c10d::Backend>& ring,
                                               const c10::intrusive_ptr<c10d::Backend>& foreign) {
  auto* beside = dynamic_cast<ProcessGroupRing*>(ring.get());
  if (beside == nullptr)
    throw Error(ErrorKind::kValue, "a watchdog needs the backend ring beside the backend it watches");
  return beside->watchdog(foreign);
}

}  // namespace

void bind_watchdog(py::module_& module) {
  py::class_<BackendWatchdog, std::shared_ptr<BackendWatchdog>>(
      module, "BackendWatchdog", "Aborts a backend that moves device tensors when the ring beside it fails.")
      .def_property_readonly("backend", &BackendWatchdog::backend)
      .def_property_readonly("failed", &BackendWatchdog::failed)
      .def_property_readonly("aborted", &BackendWatchdog::aborted);
  module.def("watch_group", &watch_group, py::arg("process_group"), py::call_guard<py::gil_scoped_release>(),
             "Watchdogs of the backends that move the group's tensors beside ring, one each; none where ring is not "
             "in the group, or alone. They live as long as the group.");
  module.def("watch_backend", &watch_backend, py::arg("ring"), py::arg("foreign"),
             py::call_guard<py::gil_scoped_release>(), "The watchdog of one backend, beside another that is ring.");
}

}  // namespace ringdp
