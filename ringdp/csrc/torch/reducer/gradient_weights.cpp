#include "torch/reducer/gradient_weights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "engine/elastic_group.h"

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

void GradientWeights::announce(double weight, bool sync, bool discarded, const std::string& note) {
  if (discarded) done_.clear();
  if (!repeats_) announced_.reset();
  const bool sends = sync && !announced_ && !group_.first_unit();
  const UnitScope unit;
  of_forward_ = weight;
  if (!MicroBatches::valid(weight)) {
    if (sends) finish(begin_exchange({weight, weight}));  // throws on all ranks
    throw Error(ErrorKind::kValue, invalid_text(weight));
  }
  if (!sends) return;
  MicroBatches with_this = done_;
  with_this.add(weight);
  announced_ = begin_exchange({with_this.total(), with_this.reference()}, note);
}

void GradientWeights::shadow() { finish(begin_exchange({})); }

void GradientWeights::accumulate(int task, double weight) {
  if (!on_) return;
  if (task == task_) return check_same(weight);
  task_ = task;
  current_ = weight;
  factors_ = {};
  factors_.incoming = done_.add(weight);
}

void GradientWeights::check_same(double weight) const {
  if (!on_ || weight == current_) return;
  throw Error(ErrorKind::kValue, "a backward goes through two forwards of different weight, " + shown(current_) +
                                     " and " + shown(weight) + ": call set_weight with the same number before each");
}

void GradientWeights::begin(int task, double weight, int64_t step) {
  if (!on_) return;
  accumulate(task, weight);
  // The forward of a backward that averages on demand has not exchanged weights. The group may have other ranks since.
  if (announced_ && (announced_->shares.size(0) != group_.ranks() || announced_->view != group_.view()))
    announced_.reset();
  unknown_ = group_.first_unit();
  factors_.when_sent = group_.elastic() != nullptr;
  if (unknown_) return announced_.reset();
  const UnitScope unit;
  Exchange exchange = announced_ ? std::move(*announced_) : begin_exchange(done());
  announced_.reset();
  if (exchange.own != done()) throw Error(ErrorKind::kState, kOrder);
  try {
    set_known(finish(std::move(exchange)), step);
  } catch (const Error& error) {
    if (!factors_.when_sent || !is_loss(error)) throw;
    unknown_ = true;
  }
}

void GradientWeights::exchange_again(int64_t step) {
  if (!on_) return;
  set_known(finish(begin_exchange(done())), step);
  unknown_ = false;
}

void GradientWeights::set_known(Known known, int64_t step) {
  factors_.of_ranks = std::move(known.factors);
  totals_ = std::move(known.totals);
  view_ = known.view;
  const auto is = [this](double value) {
    return std::all_of(factors_.of_ranks.begin(), factors_.of_ranks.end(), [=](double one) { return one == value; });
  };
  if (is(0) && !std::exchange(warned_, true)) {
    TORCH_WARN("RingDP: the batches of all ranks weigh nothing in step ", step,
               ": its gradients are zeros. This warning appears once.");
  }
  if (!factors_.when_sent) factors_.outgoing = factors_.of_ranks[static_cast<std::size_t>(group_.rank())];
  if (is(1)) factors_.of_ranks.clear();
}

void GradientWeights::end() {
  repeats_ = false;
  done_.clear();
  task_ = -1;
  factors_ = {};
  totals_.clear();
  unknown_ = false;
}

void GradientWeights::check_announced(const std::string& parameter) const {
  if (!on_ || task_ != -1) return;
  throw Error(ErrorKind::kState, "a gradient of " + parameter +
                                     " came from a backward that went through no output of RingDP's forward, so its "
                                     "weight is not known: call the wrapper, not the module inside it");
}

double GradientWeights::factor_of_left_over() {
  return on_ ? finish(begin_exchange(done())).factors[static_cast<std::size_t>(group_.rank())] : 1;
}

GradientWeights::Exchange GradientWeights::begin_exchange(Share own, const std::string& note) {
  Exchange exchange;
  exchange.own = own;
  exchange.view = group_.view();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  exchange.shares = at::zeros({group_.ranks(), 2}, at::kDouble);
  auto* mine = exchange.shares.mutable_data_ptr<double>() + 2 * group_.rank();
  mine[0] = own.total;
  mine[1] = own.reference;
  if (group_.ranks() == 1) return exchange;
  exchange.shares = exchange.shares.to(group_.control_device(parameters_.tensors().front()));
  std::vector<at::Tensor> tensors{exchange.shares};
  const NamedScope scope("weights" + note);
  exchange.work = group_.process_group()->allreduce(tensors);  // a sum: each row is one rank's and zeros
  return exchange;
}

GradientWeights::Known GradientWeights::finish(Exchange exchange) {
  if (exchange.work) group_.wait(*exchange.work, exchange.shares.device());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor shares = exchange.shares.cpu();
  const auto* all = shares.const_data_ptr<double>();
  if (!MicroBatches::valid(exchange.own.total)) throw Error(ErrorKind::kValue, invalid_text(exchange.own.total));
  double sum = 0;
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    if (!MicroBatches::valid(all[2 * rank])) throw_invalid(rank, all[2 * rank]);
    sum += all[2 * rank];
  }
  if (!MicroBatches::valid(sum))
    throw Error(ErrorKind::kValue, "the sum of the ranks' weights is not a finite number: give smaller ones");
  Known known;
  known.view = exchange.view;
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    known.factors.push_back(
        MicroBatches::factor(all[2 * rank + 1], sum, static_cast<double>(group_.ranks_with_input())));
    known.totals.push_back(all[2 * rank]);
  }
  return known;
}

void GradientWeights::throw_invalid(int rank, double weight) const {
  ErrorContext context;
  context.rank = group_.rank();
  context.peer = rank;
  context.name = "weights";
  throw Error(ErrorKind::kMismatch, "rank " + std::to_string(rank) + ": " + invalid_text(weight), context);
}

}  // namespace ringdp
