// ReplicaHash: hashes of tensors that should be equal on all ranks, of whole tensors or of a part of all their bytes.
// Owned by Python (ringdp/ddp/divergence), called between steps by the thread that trains, without the GIL.
//
// GradientMarks: which gradients are unchanged since a backward, judged by the tensor and its version: a write into a
// gradient through torch, or another tensor in its place, changes one of the two.
// Owned by Python (ringdp/ddp/overflow.py), called under the GIL.
//
// ModuleSnapshot: which parameters a module had, and where, when its gradients' buckets were laid out. `differs`
// notices a parameter or submodule that was replaced, added, removed or renamed since, in a walk over the modules'
// dictionaries: some 20 us for 300 modules, without Python code. Owned by RingDP (Python); every call is made under
// the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ringdp {

class GradientMarks {
 public:
  explicit GradientMarks(std::vector<at::Tensor> parameters);

  // After a backward that reduced gradients: whether they are finite. Gradients that it did not touch keep their
  // verdict.
  void note(bool finite);
  // By parameter: whether its gradient is unchanged since it was noted, and finite.
  std::vector<bool> finite() const;
  // The caller has changed these gradients, and they are finite; drops all other verdicts.
  void renew(const std::vector<std::size_t>& parameters);

 private:
  struct Mark {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> gradient{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};  // weak: keeps its address unique
    uint32_t version = 0;
    bool finite = false;
  };

  static bool fits(const Mark& mark, const at::Tensor& gradient);
  static Mark mark_of(const at::Tensor& gradient, bool finite);

  const std::vector<at::Tensor> parameters_;
  std::vector<Mark> marks_;
};

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

class ReplicaHash {
 public:
  // Strided tensors on the CPU; others are an Error(kValue) that names the index.
  explicit ReplicaHash(std::vector<at::Tensor> tensors);

  // The hash of the `part`-th of `parts` about equal parts of all tensors' concatenated bytes: the sum of the hashes
  // of its pieces, one for each tensor, so that their order does not matter.
  uint64_t part(std::size_t part, std::size_t parts) const;
  // The tensors with bytes in that part: the first one, and one past the last.
  std::pair<std::size_t, std::size_t> tensors_in(std::size_t part, std::size_t parts) const;
  std::vector<uint64_t> each() const;
  std::size_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }

 private:
  // Calls visit(tensor, begin, end) for the bytes of each tensor in a part.
  template <class Visit>
  void for_pieces(std::size_t part, std::size_t parts, Visit visit) const;

  std::vector<at::Tensor> tensors_;
  std::vector<std::size_t> ends_;  // the end of each tensor in the concatenated bytes
};

}  // namespace ringdp
