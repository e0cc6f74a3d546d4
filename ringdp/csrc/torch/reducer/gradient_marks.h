// GradientMarks: which gradients are unchanged since a backward, judged by the tensor and its version: a write into a
// gradient through torch, or another tensor in its place, changes one of the two.
// Owned by Python (ringdp/ddp/overflow.py), called under the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
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

}  // namespace ringdp
