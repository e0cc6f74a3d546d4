#include "torch/reducer/gradient_weights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/scalar_tensor.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/naming.h"

namespace ringdp {
namespace {

std::string shown(double weight) {
  std::ostringstream text;
  text << weight;
  return text.str();
}

std::string invalid_text(double weight) {
  return "the weight of a batch must be a finite number that is not negative, not " + shown(weight) +
         ": it is the number of samples (or tokens) whose mean loss the backward starts from";
}

constexpr const char* kOrder =
    "with weights, the backward of each micro-batch has to run before the forward of the next one that averages: its "
    "forward has sent this rank's weights";

}  // namespace

void GradientWeights::announce(double weight, bool sync, bool discarded) {
  if (discarded) done_.clear();
  if (!repeats_) announced_.reset();
  const bool sends = sync && !announced_;
  of_forward_ = weight;
  if (!MicroBatches::valid(weight)) {
    if (sends) finish(begin_sum(weight));  // throws on all ranks
    throw Error(ErrorKind::kValue, invalid_text(weight));
  }
  if (sends) announced_ = begin_sum(done_.total() + weight);
}

void GradientWeights::shadow() { finish(begin_sum(0)); }

void GradientWeights::accumulate(int task, double weight) {
  if (!on_) return;
  if (task == task_) return check_same(weight);
  task_ = task;
  current_ = weight;
  factors_ = {done_.add(weight), 1};
}

void GradientWeights::check_same(double weight) const {
  if (!on_ || weight == current_) return;
  throw Error(ErrorKind::kValue, "a backward goes through two forwards of different weight, " + shown(current_) +
                                     " and " + shown(weight) + ": call set_weight with the same number before each");
}

void GradientWeights::begin(int task, double weight, int64_t step) {
  if (!on_) return;
  accumulate(task, weight);
  // A backward that averages on demand has a forward that did not know of it.
  Sum sum = announced_ ? std::move(*announced_) : begin_sum(done_.total());
  announced_.reset();
  if (sum.own != done_.total()) throw Error(ErrorKind::kState, kOrder);
  const double all = finish(std::move(sum));
  if (all == 0 && !std::exchange(warned_, true)) {
    TORCH_WARN("RingDP: the batches of all ranks weigh nothing in step ", step,
               ": its gradients are zeros. This warning appears once.");
  }
  factors_.outgoing = done_.factor(all, static_cast<double>(group_.ranks_with_input()));
}

void GradientWeights::end() {
  repeats_ = false;
  done_.clear();
  task_ = -1;
  factors_ = {};
}

void GradientWeights::check_announced(const std::string& parameter) const {
  if (!on_ || task_ != -1) return;
  throw Error(ErrorKind::kState, "a gradient of " + parameter +
                                     " came from a backward that went through no output of RingDP's forward, so its "
                                     "weight is not known: call the wrapper, not the module inside it");
}

double GradientWeights::factor_of_left_over() {
  return on_ ? done_.factor(finish(begin_sum(done_.total())), group_.ranks()) : 1;
}

GradientWeights::Sum GradientWeights::begin_sum(double own) {
  Sum sum;
  sum.own = own;
  if (group_.ranks() == 1) return sum;
  const double sent = MicroBatches::valid(own) ? own : std::numeric_limits<double>::quiet_NaN();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  sum.total =
      at::scalar_tensor(sent, at::kDouble).reshape({1}).to(group_.control_device(parameters_.tensors().front()));
  std::vector<at::Tensor> tensors{sum.total};
  const NamedScope scope("weights");
  sum.work = group_.process_group()->allreduce(tensors);
  return sum;
}

// Throws on all ranks, if the weight of one of them is not valid.
double GradientWeights::finish(Sum sum) {
  if (sum.work) {
    sum.work->wait();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const double all = sum.total.item<double>();
    if (!MicroBatches::valid(all) || !MicroBatches::valid(sum.own)) throw_invalid(sum.own);
    return all;
  }
  if (!MicroBatches::valid(sum.own)) throw Error(ErrorKind::kValue, invalid_text(sum.own));
  return sum.own;
}

void GradientWeights::throw_invalid(double own) {
  std::vector<uint8_t> mine(sizeof own);
  std::memcpy(mine.data(), &own, sizeof own);
  const auto all =
      group_.gather(mine, group_.control_device(parameters_.tensors().front()), "weights that cannot be used");
  if (!MicroBatches::valid(own)) throw Error(ErrorKind::kValue, invalid_text(own));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    double weight = 0;
    std::memcpy(&weight, all[rank].data(), sizeof weight);
    if (MicroBatches::valid(weight)) continue;
    ErrorContext context;
    context.rank = group_.rank();
    context.peer = static_cast<int>(rank);
    context.name = "weights";
    throw Error(ErrorKind::kMismatch, "rank " + std::to_string(rank) + ": " + invalid_text(weight), context);
  }
  throw Error(ErrorKind::kValue, "the sum of the ranks' weights is not a finite number: give smaller ones");
}

}  // namespace ringdp
