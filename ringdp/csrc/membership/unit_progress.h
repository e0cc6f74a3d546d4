// UnitProgress: a member's progress in units, and its allowed next steps. A unit is done when the rank has its own
// complete results, and left when the rank knows that all members of its view have done it. A value type; its owner
// locks. Explored in tests/cpp/test_agreement.cpp.
#pragma once

#include <cstdint>

#include "membership/agreement.h"

namespace ringdp {

class UnitProgress {
 public:
  // `freezes`: false is wrong, and for the tests.
  explicit UnitProgress(bool freezes = true) : freezes_(freezes) {}

  uint64_t left() const { return left_; }  // the number of units left, over all views
  uint64_t view() const { return view_; }
  bool done() const { return done_; }  // the unit after these
  bool frozen() const { return frozen_; }

  enum class Entry { kLeft, kFrozen, kEntered };
  // This rank has its results of the unit, and will enter the barrier. kLeft: a change has counted the unit meanwhile;
  // kFrozen: this rank has published its state, and completes no further unit.
  Entry enter(uint64_t unit);
  // All members of `view` have entered the barrier. False: the members have changed since, and the unit does not
  // count.
  bool leave(uint64_t unit, uint64_t view);
  // This rank's state, which is now frozen: it enters no barrier until the next view is installed.
  MemberState freeze();
  void install(uint64_t view, uint64_t committed);

 private:
  bool freezes_;
  uint64_t left_ = 0;
  uint64_t view_ = 1;
  bool done_ = false;
  bool frozen_ = false;
};

}  // namespace ringdp
