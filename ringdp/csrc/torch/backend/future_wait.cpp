#include "torch/backend/future_wait.h"

#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <memory>
#include <mutex>

#include "base/process_stacks.h"
#include "torch/backend/process_group.h"

namespace ringdp {
namespace {

struct Completion {
  std::mutex mutex;
  std::condition_variable changed;
};

PyObject* helper_threads = nullptr;  // guarded by Python's lock

// With Python's lock, under which threads begin and end. Throws an exception of a signal handler that runs in the
// call, which is the program's.
ProgramThreadCount count_program_threads() {
  const auto at = std::chrono::steady_clock::now();
  int threads = 0;
  for (PyThreadState* it = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); it != nullptr;
       it = PyThreadState_Next(it))
    ++threads;
  if (threads == 1 || helper_threads == nullptr) return {threads, at};
  PyObject* helpers = PyObject_CallNoArgs(helper_threads);
  if (helpers == nullptr) throw pybind11::error_already_set();
  const long count = PyLong_AsLong(helpers);
  Py_DECREF(helpers);
  if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return {threads - static_cast<int>(count), at};
}

}  // namespace

void set_helper_threads(PyObject* count) { helper_threads = count; }

void check_python_signals() {
  if (Py_IsInitialized() == 0) return;
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  note_program_threads(count_program_threads());
}

bool wait_until_complete(c10::ivalue::Future& future, std::chrono::milliseconds limit,
                         const std::function<void()>& look) {
  using Clock = std::chrono::steady_clock;
  if (future.completed()) return true;
  const auto completion = std::make_shared<Completion>();  // shared with the future, which may outlive this wait
  future.addCallback(
      [completion](c10::ivalue::Future&) {
        const std::lock_guard lock(completion->mutex);
        completion->changed.notify_all();
      },
      /*uses_future=*/false);
  const auto begin = Clock::now();
  std::unique_lock lock(completion->mutex);
  while (!future.completed()) {
    if (completion->changed.wait_for(lock, kInterruptPeriod) == std::cv_status::no_timeout) continue;
    lock.unlock();
    check_python_signals();
    if (look) look();
    if (limit.count() > 0 && Clock::now() - begin > limit) return future.completed();
    lock.lock();
  }
  return true;
}

std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group, c10::DeviceType device) {
  if (const ProcessGroupRing* ring = ring_of(group, device)) return ring->timeout();
  try {
    const auto options = group.getBackend(device)->getBackendOptions();
    return options ? options->timeout : std::chrono::milliseconds(0);
  } catch (const c10::Error&) {  // not every backend has one
    return std::chrono::milliseconds(0);
  }
}

}  // namespace ringdp
