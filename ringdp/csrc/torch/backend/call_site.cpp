#include "torch/backend/call_site.h"

#include <Python.h>
#include <frameobject.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

namespace ringdp {
namespace {

constexpr int kKeyFrames = 32;   // frames of a stack in its key
constexpr int kTextFrames = 20;  // frames of a stack in its text
constexpr std::size_t kSlots = 2 * static_cast<std::size_t>(kMostCallSites);

// One frame of the interpreter: its code, the position in it, and the frame below. The layout is not part of Python's
// API; it is constant within a minor release.
#if defined(Py_GIL_DISABLED) || PY_VERSION_HEX >= 0x030F0000
constexpr bool kKnown = false;
struct Frame {
  void* code;
  Frame* previous;
  void* at;
};
Frame* top_frame(PyThreadState*) { return nullptr; }
#elif PY_VERSION_HEX >= 0x030C0000
constexpr bool kKnown = true;
struct Frame {
  void* code;
  Frame* previous;
  std::array<void*, 5> others;  // function, globals, builtins, locals, frame object
  void* at;
};
Frame* top_frame(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<Frame*>(thread->current_frame);
#else
  return reinterpret_cast<Frame*>(thread->cframe->current_frame);
#endif
}
#elif PY_VERSION_HEX >= 0x030B0000
constexpr bool kKnown = true;
struct Frame {
  std::array<void*, 4> others;  // function, globals, builtins, locals
  void* code;
  void* frame_object;
  Frame* previous;
  void* at;
};
Frame* top_frame(PyThreadState* thread) { return reinterpret_cast<Frame*>(thread->cframe->current_frame); }
#else
constexpr bool kKnown = true;
using Frame = PyFrameObject;
Frame* top_frame(PyThreadState* thread) { return thread->frame; }
#endif

uint64_t mix(uint64_t key, uint64_t value) {
  key = (key ^ value) * 0x9e3779b97f4a7c15ULL;
  return key ^ (key >> 29);
}

uint64_t key_of(PyThreadState* thread) {
  uint64_t key = 1;
  int depth = 0;
  for (const Frame* frame = top_frame(thread); frame != nullptr && depth < kKeyFrames; ++depth) {
#if PY_VERSION_HEX < 0x030B0000
    key = mix(mix(key, reinterpret_cast<uint64_t>(frame->f_code)), static_cast<uint64_t>(frame->f_lasti));
    frame = frame->f_back;
#else
    key = mix(mix(key, reinterpret_cast<uint64_t>(frame->code)), reinterpret_cast<uint64_t>(frame->at));
    frame = frame->previous;
#endif
  }
  return depth == 0 ? 0 : key | 1;
}

struct Slot {
  std::atomic<uint64_t> key{0};
  std::atomic<int32_t> number{-1};
};

std::array<Slot, kSlots> slots;
std::atomic<int32_t> known{0};
std::mutex texts_mutex;

// Never destroyed: threads may use it while the process ends.
std::vector<std::string>& texts() {
  static auto* all = new std::vector<std::string>();
  return *all;
}

int32_t find(uint64_t key) {
  for (std::size_t i = 0; i < kSlots; ++i) {
    const Slot& slot = slots[(key + i) % kSlots];
    const uint64_t there = slot.key.load(std::memory_order_acquire);
    if (there == key) return slot.number.load(std::memory_order_relaxed);
    if (there == 0) return -1;
  }
  return -1;
}

std::string utf8(PyObject* text) {
  const char* bytes = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
  if (bytes == nullptr) PyErr_Clear();
  return bytes != nullptr ? bytes : "?";
}

// With Python's lock. Keeps references to the code objects for ever, so that no other object gets an address in a key.
std::string describe(PyThreadState* thread) {
  std::string out;
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  for (int depth = 0; frame != nullptr && depth < kKeyFrames; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (depth < kTextFrames)
      out += utf8(code->co_filename) + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " in " +
             utf8(code->co_name) + "\n";
    // Keeps a reference to `code`.
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return out;
}

int32_t learn(PyThreadState* thread, uint64_t key) {
  const PyGILState_STATE state = PyGILState_Ensure();
  std::string text = describe(thread);
  int32_t number = -1;
  {
    std::lock_guard lock(texts_mutex);
    number = find(key);
    if (number < 0 && known.load(std::memory_order_relaxed) < kMostCallSites) {
      number = static_cast<int32_t>(texts().size());
      texts().push_back(std::move(text));
      for (std::size_t i = 0; i < kSlots; ++i) {
        Slot& slot = slots[(key + i) % kSlots];
        if (slot.key.load(std::memory_order_relaxed) != 0) continue;
        slot.number.store(number, std::memory_order_relaxed);
        slot.key.store(key, std::memory_order_release);
        break;
      }
      known.store(number + 1, std::memory_order_release);
    }
  }
  PyGILState_Release(state);
  return number;
}

}  // namespace

int32_t python_call_site() {
  if (!kKnown || Py_IsInitialized() == 0) return -1;
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return -1;
  const uint64_t key = key_of(thread);
  if (key == 0) return -1;
  const int32_t number = find(key);
  return number >= 0 || known.load(std::memory_order_acquire) >= kMostCallSites ? number : learn(thread, key);
}

std::string python_call_site_text(int32_t number) {
  std::lock_guard lock(texts_mutex);
  return number >= 0 && static_cast<std::size_t>(number) < texts().size() ? texts()[static_cast<std::size_t>(number)]
                                                                          : "";
}

}  // namespace ringdp
