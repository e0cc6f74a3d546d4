#include "membership/unit_progress.h"

namespace ringdp {

UnitProgress::Entry UnitProgress::enter(uint64_t unit) {
  if (left_ >= unit) return Entry::kLeft;
  if (frozen_) return Entry::kFrozen;
  done_ = true;
  return Entry::kEntered;
}

bool UnitProgress::leave(uint64_t unit, uint64_t view) {
  if (left_ >= unit) return true;  // a change has counted it
  if (view_ != view) return false;
  left_ = unit;
  done_ = false;
  return true;
}

MemberState UnitProgress::freeze() {
  frozen_ = freezes_;
  MemberState state;
  state.left = left_;
  state.done = done_;
  return state;
}

void UnitProgress::install(uint64_t view, uint64_t committed) {
  view_ = view;
  left_ = committed;
  done_ = frozen_ = false;
}

}  // namespace ringdp
