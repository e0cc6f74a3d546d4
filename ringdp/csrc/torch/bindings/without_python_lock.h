// WithoutPythonLock: releases the GIL while a thread waits for threads that may need it. A local variable; any thread.
#pragma once

#include <Python.h>  // first, as Python asks

#include <memory>
#include <utility>

namespace ringdp {

// Releases the GIL for its lifetime, if this thread holds it.
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

// A shared object that is destroyed without the GIL: it may hold the last reference to a backend, whose destructor
// joins threads that may be releasing Python's tensors.
template <typename T, typename... Arguments>
std::shared_ptr<T> make_shared_without_python_lock(Arguments&&... arguments) {
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [](T* it) {
    const WithoutPythonLock no_lock;
    delete it;
  });
}

}  // namespace ringdp
