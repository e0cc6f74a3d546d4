// ModuleSnapshot: which parameters a module had, and where, when its gradients' buckets were laid out. `differs`
// notices a parameter or submodule that was replaced, added, removed or renamed since, in a walk over the modules'
// dictionaries: some 20 us for 300 modules, without Python code. Owned by RingDP (Python); every call is made under
// the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <vector>

namespace ringdp {

class ModuleSnapshot {
 public:
  explicit ModuleSnapshot(const pybind11::object& module) : taken_(walk(module, 0)) {}

  bool differs(const pybind11::object& module) const { return walk(module, taken_.size()) != taken_; }

 private:
  // Addresses of modules, names, and parameters' tensors, only for comparison: RingDP's reducer keeps the tensors
  // alive, so that no other tensor gets their addresses.
  using Places = std::vector<const void*>;
  static Places walk(const pybind11::object& module, std::size_t expected);

  Places taken_;
};

}  // namespace ringdp
