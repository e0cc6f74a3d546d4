// ringdp._C.set_stack_source: Python's stacks for dumps and stall notices. With Python's lock if it is free in time:
// then the frames do not change. If not, a thread holds it inside C code, so no Python code runs and the frames do not
// change either: faulthandler's signal handler writes them without the lock.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/process_stacks.h"
#include "base/thread.h"
#include "torch/backend/call_site.h"
#include "torch/backend/future_wait.h"
#include "torch/bindings/bindings.h"

namespace ringdp {
namespace {

namespace py = pybind11;

constexpr std::size_t kMostBytes = 64 * 1024;  // of faulthandler's output

struct Answer {
  std::mutex mutex;
  std::condition_variable there;
  std::string text;
  bool done = false;
};

// Python's arguments. Set once in a process; the references are never released.
struct Source {
  py::object describe;
  int signal = 0;  // on which faulthandler writes to `file`; 0: none was free
  int file = -1;
};

// `answer`: of the last started thread; while that one waits for the lock, no other is started.
std::string with_the_lock(const Source& source, int64_t limit_ms, std::shared_ptr<Answer>& answer, bool& done) {
  if (answer) {
    std::lock_guard lock(answer->mutex);
    if (!answer->done) return "";
  }
  answer = std::make_shared<Answer>();  // shared with a thread that may wait for the lock for ever
  try {
    auto thread = start_thread("ringdp-python", [answer, describe = source.describe.ptr()] {
      if (Py_IsInitialized() == 0) return;
      const PyGILState_STATE state = PyGILState_Ensure();
      std::string text;
      if (PyObject* result = PyObject_CallNoArgs(describe)) {
        if (const char* bytes = PyUnicode_AsUTF8(result)) text = bytes;
        Py_DECREF(result);
      }
      if (PyErr_Occurred() != nullptr) PyErr_Clear();
      PyGILState_Release(state);
      std::lock_guard lock(answer->mutex);
      answer->text = std::move(text);
      answer->done = true;
      answer->there.notify_one();
    });
    thread->detach();
  } catch (const Error&) {
    answer = nullptr;
    return "";
  }
  std::unique_lock lock(answer->mutex);
  done = answer->there.wait_for(lock, std::chrono::milliseconds(limit_ms), [&] { return answer->done; });
  return done ? answer->text : "";
}

std::string without_the_lock(const Source& source, int64_t limit_ms) {
  const std::string why = "(C code holds Python's lock)\n";
  if (source.signal == 0) return why;
  if (::ftruncate(source.file, 0) != 0 || ::lseek(source.file, 0, SEEK_SET) != 0) return why;
  if (syscall(SYS_tgkill, getpid(), getpid(), source.signal) != 0) return why;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
  off_t before = -1;
  while (std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const off_t now = ::lseek(source.file, 0, SEEK_END);
    if (now > 0 && now == before) break;
    before = now;
  }
  std::string text(kMostBytes, '\0');
  const ssize_t length = ::pread(source.file, text.data(), text.size(), 0);
  text.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
  // Moves the part of the main thread, which the signal has interrupted, to the front.
  if (const auto main = text.find("Current thread"); main != std::string::npos && main > 0)
    text = text.substr(main) + "\n" + text.substr(0, main);
  return why + text;
}

void set_source(py::function describe, py::function helper_threads, int signal, int file,
                std::vector<std::string> foreign) {
  prepare_native_stack();
  set_helper_threads(helper_threads.release().ptr());  // never released either
  auto* source = new Source{std::move(describe), signal, file};
  auto last = std::make_shared<std::shared_ptr<Answer>>();  // shared with the copies of the function
  set_stack_source({[source, last](int64_t limit_ms) {
                      bool done = false;
                      std::string text = with_the_lock(*source, limit_ms, *last, done);
                      return done ? text : without_the_lock(*source, limit_ms);
                    },
                    python_call_site_text, std::move(foreign)});
}

}  // namespace

void bind_python_stacks(py::module_& module) {
  module.def("set_stack_source", &set_source, py::arg("describe"), py::arg("helper_threads"), py::arg("signal"),
             py::arg("file"), py::arg("foreign"),
             "`describe()`: the stacks of all threads as text. `helper_threads()`: how many run nothing of the "
             "program. `signal`, `file`: where faulthandler writes them (0: "
             "nowhere). `foreign`: beginnings of paths that are not the user's.");
  module.def(
      "forget_stack_source",
      [] {
        set_helper_threads(nullptr);
        set_stack_source({{}, python_call_site_text, {}});
      },
      "Before the interpreter ends.");
}

}  // namespace ringdp
