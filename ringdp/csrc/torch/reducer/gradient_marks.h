// GradientMarks: which gradients are still what a backward left, by the tensor and its version: whoever writes into a
// gradient through torch, or puts another one in its place, changes one of the two. Belongs to Python; under the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringdp {

class GradientMarks {
 public:
  explicit GradientMarks(std::vector<at::Tensor> parameters);

  // After a backward that reduced gradients: are they finite? Then those it did not touch keep the verdict they had.
  void note(bool finite);
  // By parameter: its gradient is what was noted, and finite.
  std::vector<bool> finite() const;
  // These gradients are as they are now by intention, and finite; about all others nothing is known any more.
  void renew(const std::vector<std::size_t>& parameters);

 private:
  struct Mark {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> gradient{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};  // weak: its address is nobody else's
    uint32_t version = 0;
    bool finite = false;
  };

  static bool fits(const Mark& mark, const at::Tensor& gradient);
  static Mark mark_of(const at::Tensor& gradient, bool finite);

  const std::vector<at::Tensor> parameters_;
  std::vector<Mark> marks_;
};

}  // namespace ringdp
