// MicroBatches: the weights of the backwards whose gradients a rank adds up before it averages them with the other
// ranks'. The mean over all samples is sum(w * g) / sum(w), over the micro-batches of all ranks; g is the gradient of
// a micro-batch's mean loss, w the number of its samples (or tokens). .grad adds up (w / reference) * g, so that it
// keeps the size of a gradient; what is sent is .grad times `factor`. No torch. Owned by GradientWeights, used under
// the Reducer's lock.
#pragma once

#include <cmath>
#include <limits>

namespace ringdp {

class MicroBatches {
 public:
  static bool valid(double weight) { return std::isfinite(weight) && weight >= 0; }

  // A backward of this weight begins. Returns the factor of its gradients: 1 for the first one and for equal weights,
  // 0 for weight 0.
  double add(double weight) {
    if (reference_ == 0) reference_ = weight;
    total_ += weight;
    return reference_ == 0 ? 0.0 : weight / reference_;
  }
  // Sets the reference weight, unless a backward has set it.
  void refer_to(double weight) {
    if (reference_ == 0) reference_ = weight;
  }
  double total() const { return total_; }
  double reference() const { return reference_; }
  void clear() { total_ = reference_ = 0; }

  // The factor of a rank's accumulated gradient such that the sum over the ranks divided by `divisor` is the mean.
  // `reference`: that rank's, `sum`: of the totals of all ranks. Exactly 1 if all ranks have the same total and the
  // weights are equal; 0 if all weights are 0.
  static double factor(double reference, double sum, double divisor) {
    if (sum == 0 || reference == 0) return 0.0;
    const double factor = divisor * reference / sum;
    // The sum of equal numbers that are not integers may be rounded.
    const double rounding = 2 * (divisor + 1) * std::numeric_limits<double>::epsilon();
    return std::abs(factor - 1) <= rounding ? 1.0 : factor;
  }

 private:
  double total_ = 0;
  double reference_ = 0;  // the first weight above zero
};

}  // namespace ringdp
