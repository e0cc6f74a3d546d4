#include "torch/reducer/forwards.h"

#include <algorithm>

namespace ringdp {
namespace {

constexpr const char* kLeftOut = " without a backward";
constexpr const char* kEvaluation = " of the optimizer's closure";

std::string left_out(int64_t forwards) {
  if (forwards <= 0) return {};
  return " (after " + std::to_string(forwards) + (forwards == 1 ? " forward" : " forwards") + kLeftOut + ")";
}

}  // namespace

void Forwards::count(Forward& forward, bool in_graph) {
  training_ = forward.training;
  Counts& mine = counts(forward.training);
  if (!in_graph) {
    ++mine.unseen;
    return;
  }
  forward.period = period_;
  ++mine.open;
}

void Forwards::follow(Forward& forward) {
  if (forward.period < 0) return;
  training_ = forward.training;
  seen_ = true;
  if (!forward.followed && forward.period == period_) --counts(forward.training).open;
  forward.followed = true;
}

void Forwards::begin(bool comparable) {
  comparable_ = comparable;
  if (evaluating_) ++evaluations_;
}

void Forwards::settle() {
  counts_[0] = counts_[1] = {};
  seen_ = false;
  ++period_;
}

std::string Forwards::note() const {
  if (!comparable_) return {};
  const Counts& mine = counts_[training_ ? 1 : 0];
  std::string text = left_out(mine.open + std::max<int64_t>(0, mine.unseen - (seen_ ? 0 : 1)));
  if (evaluations_ > 1) text += " (evaluation " + std::to_string(evaluations_) + kEvaluation + ")";
  return text;
}

std::string Forwards::note_of(bool training) const {
  const Counts& mine = counts_[training ? 1 : 0];
  return left_out(mine.open + mine.unseen);
}

std::string Forwards::explain(const std::string& text) {
  std::string out;
  if (text.find(kLeftOut) != std::string::npos)
    out +=
        ". A rank with more forwards without a backward has left out the backward of a batch (its loss was not finite, or "
        "`continue`): its backwards met those of other steps. Leave a batch out on all ranks alike, or let its backward "
        "run and give it no weight (RingDP(weight=\"call\") and set_weight(0)). A forward that is to have no backward "
        "belongs under torch.no_grad(), no_sync() or eval()";
  if (text.find(kEvaluation) != std::string::npos)
    out +=
        ". The ranks' optimizers evaluate their closures unequally often: a closure that a line search looks at (LBFGS) has "
        "to return the same loss on all ranks, the mean of theirs";
  return out;
}

}  // namespace ringdp
