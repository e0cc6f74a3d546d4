#include "torch/guard.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "engine/thread.h"
#include "torch/bindings.h"
#include "torch/ring_of.h"

namespace ringdp {
namespace {

constexpr std::chrono::milliseconds kInterruptPeriod{100};
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

}  // namespace

DeviceGuard::DeviceGuard(std::shared_ptr<GroupHandle> group, c10::intrusive_ptr<c10d::Backend> foreign)
    : group_(std::move(group)), state_(std::make_shared<State>()), foreign_(std::move(foreign)) {
  state_->name = foreign_->getBackendName();
  thread_ = start_thread("ringdp-guard", [state = state_, foreign = foreign_] { run(state, foreign); });
  listener_ = std::make_shared<const FailureListener>([state = state_](const std::exception_ptr& failure) {
    std::lock_guard lock(state->mutex);
    state->failure = failure;
    state->changed.notify_all();
  });
  group_->on_failure(listener_);
}

DeviceGuard::~DeviceGuard() {
  if (fork_generation() == generation_) {
    close();
    return;
  }
  // The thread exists in the parent only, whose mutex it may have held when this process was made.
  [[maybe_unused]] auto* thread = thread_.release();
  [[maybe_unused]] auto* state = new std::shared_ptr<State>(state_);
  [[maybe_unused]] auto* foreign = new c10::intrusive_ptr<c10d::Backend>(foreign_);
}

void DeviceGuard::run(const std::shared_ptr<State>& state, const c10::intrusive_ptr<c10d::Backend>& foreign) {
  std::unique_lock lock(state->mutex);
  state->changed.wait(lock, [&] { return state->stopping || state->failure; });
  if (state->failure && !state->stopping) {
    const std::string cause = text_of(state->failure);
    lock.unlock();
    // Said before: what the abort ends may end the process (torch's watchdog of NCCL), or only show as wrong numbers.
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

void DeviceGuard::close() {
  if (!thread_ || fork_generation() != generation_) return;
  listener_.reset();
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, kLongestAbort, [&] { return state_->ended; });
  lock.unlock();
  if (!ended && thread_->joinable()) thread_->detach();  // inside an abort() that does not return: it has the state
  end_thread(thread_);
  thread_.reset();
}

std::shared_ptr<Work> DeviceGuard::announce(Announcement what) {
  what.by = state_->name;
  std::shared_ptr<Work> work = group_->announce(what, {});
  std::lock_guard lock(announced_mutex_);
  while (!announced_.empty() && announced_.front()->finished()) announced_.pop_front();
  announced_.push_back(work);
  return work;
}

void DeviceGuard::wait(Work& announcement) { group_->wait(announcement); }

void DeviceGuard::drain() {
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

std::exception_ptr DeviceGuard::failure_within(std::chrono::milliseconds time) const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, time, [&] { return state_->failure != nullptr; });
  return state_->failure;
}

void DeviceGuard::throw_if_failed() const {
  if (const auto failure = failure_within(std::chrono::milliseconds(0))) std::rethrow_exception(failure);
}

void DeviceGuard::throw_first_cause() const {
  if (const auto failure = failure_within(kCauseGrace)) std::rethrow_exception(failure);
}

void DeviceGuard::wait_for(c10::ivalue::Future& future) const {
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

bool DeviceGuard::aborted() const {
  std::lock_guard lock(state_->mutex);
  return state_->aborted;
}

std::shared_ptr<DeviceGuard> guard_of(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto types = group.getDeviceTypes();
  const auto is = [&](const c10::Device& type) { return type.type() == device; };
  if (std::none_of(types.begin(), types.end(), is) || ring_of(group, device) != nullptr) return nullptr;
  for (const c10::Device& type : types) {
    if (ProcessGroupRing* ring = ring_of(group, type.type())) return ring->guard(group.getBackend(device));
  }
  return nullptr;
}

namespace {

namespace py = pybind11;

std::vector<std::shared_ptr<DeviceGuard>> guard_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::vector<std::shared_ptr<DeviceGuard>> guards;
  for (const c10::Device& type : group->getDeviceTypes())
    if (auto guard = guard_of(*group, type.type())) guards.push_back(std::move(guard));
  return guards;
}

// For tests: any backend beside any ring.
std::shared_ptr<DeviceGuard> guard_backend(const c10::intrusive_ptr<c10d::Backend>& ring,
                                           const c10::intrusive_ptr<c10d::Backend>& foreign) {
  auto* beside = dynamic_cast<ProcessGroupRing*>(ring.get());
  if (beside == nullptr) throw Error(ErrorKind::kValue, "a guard needs the backend ring beside what it guards");
  return beside->guard(foreign);
}

}  // namespace

void bind_guard(py::module_& module) {
  py::class_<DeviceGuard, std::shared_ptr<DeviceGuard>>(
      module, "DeviceGuard", "Aborts a backend that moves device tensors when the ring beside it fails.")
      .def_property_readonly("backend", &DeviceGuard::backend)
      .def_property_readonly("aborted", &DeviceGuard::aborted);
  module.def("guard_group", &guard_group, py::arg("process_group"), py::call_guard<py::gil_scoped_release>(),
             "Guards of what moves the group's tensors beside ring, one for each such backend; none where ring is not "
             "in the group, or alone. They live as long as the group.");
  module.def("guard_backend", &guard_backend, py::arg("ring"), py::arg("foreign"),
             py::call_guard<py::gil_scoped_release>(), "The guard of one backend, beside another that is ring.");
}

}  // namespace ringdp
