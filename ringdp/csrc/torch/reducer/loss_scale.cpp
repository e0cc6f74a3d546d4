#include "torch/reducer/loss_scale.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <mutex>

#include "torch/bindings/bindings.h"

namespace ringdp {
namespace {

using torch::autograd::get_current_graph_task_id;

constexpr int kNoBackward = -1;
constexpr std::size_t kKept = 64;  // backwards that may run at once, in different threads

class LossScales {
 public:
  void note(int backward, float scale) {
    std::scoped_lock lock(mutex_);
    for (Entry& entry : entries_) {
      if (entry.backward != backward) continue;
      entry.scale = scale;
      return;
    }
    entries_[next_++ % kKept] = {backward, scale};
  }

  float of(int backward) {
    std::scoped_lock lock(mutex_);
    for (const Entry& entry : entries_)
      if (entry.backward == backward) return entry.scale;
    return 1;
  }

 private:
  struct Entry {
    int backward = kNoBackward;
    float scale = 1;
  };

  std::mutex mutex_;
  std::array<Entry, kKept> entries_;
  std::size_t next_ = 0;
};

// Autograd numbers the backwards of a whole process.
LossScales& scales() {
  static LossScales all;
  return all;
}

}  // namespace

void note_loss_scale(float scale) {
  if (const int backward = get_current_graph_task_id(); backward != kNoBackward) scales().note(backward, scale);
}

float loss_scale_of_backward() {
  const int backward = get_current_graph_task_id();
  return backward == kNoBackward ? 1 : scales().of(backward);
}

void bind_loss_scale(pybind11::module_& module) {
  module.def("note_loss_scale", &note_loss_scale, pybind11::arg("scale"),
             "Inside a backward: its loss was multiplied by `scale`.");
  module.def("loss_scale_of_backward", &loss_scale_of_backward,
             "The loss scale of the backward under way; 1 where none was noted.");
}

}  // namespace ringdp
