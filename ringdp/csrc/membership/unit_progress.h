// UnitProgress: how far a member has got with the units, and what it may do next. A unit is done when the rank has its
// own complete results, and left when it knows that all members of its view have done it. A value type without a lock:
// its owner's. Explored in tests/cpp/test_agreement.cpp.
#pragma once

#include <cstdint>

#include "membership/agreement.h"

namespace ringdp {

class UnitProgress {
 public:
  // `freezes`: false is wrong, and for the tests.
  explicit UnitProgress(bool freezes = true) : freezes_(freezes) {}

  uint64_t left() const { return left_; }  // so many units, over all views
  uint64_t view() const { return view_; }
  bool done() const { return done_; }  // with the one after these
  bool frozen() const { return frozen_; }

  enum class Entry { kLeft, kFrozen, kEntered };
  // This rank has its results of the unit, and wants to tell the others. kLeft: a change has counted it meanwhile;
  // kFrozen: it has said where it stands, and becomes done with nothing.
  Entry enter(uint64_t unit);
  // All members of `view` have entered. False: the members have changed since, and the unit does not count.
  bool leave(uint64_t unit, uint64_t view);
  // Where this rank stands, from now on: it enters nothing until the next view is installed.
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
