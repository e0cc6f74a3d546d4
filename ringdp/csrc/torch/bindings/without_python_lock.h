// WithoutPythonLock: what a thread does that waits for other threads, which may need Python's lock. Any thread.
#pragma once

#include <Python.h>  // first, as Python asks

#include <memory>
#include <utility>

namespace ringdp {

// Gives Python's lock away for a while, if this thread has it.
class WithoutPythonLock {
 public:
  WithoutPythonLock() : state_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPythonLock() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  PyThreadState* state_;
};

// Shared, and destroyed without it: for what may hold the last reference to a backend, whose destructor joins threads that
// may be letting go of Python's tensors.
template <typename T, typename... Arguments>
std::shared_ptr<T> make_shared_without_python_lock(Arguments&&... arguments) {
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [](T* it) {
    const WithoutPythonLock no_lock;
    delete it;
  });
}

}  // namespace ringdp
