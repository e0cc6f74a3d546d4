#include "torch/reducer/forwards.h"

#include <algorithm>
#include <utility>

namespace ringdp {
namespace {

constexpr const char* kLeftOut = " without a backward";
constexpr const char* kAgain = " (a second backward through one forward)";
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

bool Forwards::follow(Forward& forward) {
  if (forward.period < 0) return false;
  training_ = forward.training;
  seen_ = true;
  const bool before = forward.followed >= 0;
  if (forward.period == period_ && forward.followed != attempt_) {
    --counts(forward.training).open;
    ++counts(forward.training).followed;
  }
  forward.followed = attempt_;
  return before && forward.period != period_;
}

void Forwards::abandon() {
  for (Counts& mine : counts_) mine.open += std::exchange(mine.followed, 0);
  ++attempt_;
  seen_ = false;
}

void Forwards::settle() {
  counts_[0] = counts_[1] = {};
  seen_ = again_ = false;
  ++period_;
  ++attempt_;
}

std::string Forwards::note() const {
  if (!comparable_) return {};
  const Counts& mine = counts_[training_ ? 1 : 0];
  std::string text = left_out(mine.open + std::max<int64_t>(0, mine.unseen - (seen_ ? 0 : 1)));
  if (again_) text += kAgain;
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
        ". A rank with more forwards without a backward has left out the backward of a batch (its loss was not finite, "
        "or `continue`): its backwards met those of other steps. Leave a batch out on all ranks alike, or let its "
        "backward run and give it no weight (RingDP(weight=\"call\") and set_weight(0)). A forward that is to have no "
        "backward belongs under torch.no_grad(), no_sync() or eval()";
  if (text.find(kAgain) != std::string::npos)
    out +=
        ". A rank with a second backward through one forward runs more of them than the others, and meets those of "
        "other steps: run as many backwards on all ranks";
  if (text.find(kEvaluation) != std::string::npos)
    out +=
        ". The ranks' optimizers evaluate their closures unequally often: a closure that a line search looks at "
        "(LBFGS) has to return the same loss on all ranks, the mean of theirs";
  return out;
}

}  // namespace ringdp
