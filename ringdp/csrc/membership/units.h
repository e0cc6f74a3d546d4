// Units: what one rank commits as one, in one view: a step, or an atomic collective. It is begun, it is done when the rank has
// its own complete result, and it is left when every member of the view is done. A rank that takes part in a change of the
// view is frozen: it becomes done with nothing and leaves nothing, until the decision says what stands.
// Value type without threads; owned by the ViewConsensus of its view.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "membership/messages.h"

namespace ringdp {

class Units {
 public:
  Units(const MemberView& view, int place, uint64_t next = 1);  // `next`: the number of the unit that begins next

  // Its number: units are numbered in the order in which they begin, which is the same on all ranks. Throws
  // Error(kState) while frozen, and for more than kMaxOpenUnits.
  uint64_t begin();
  // This rank's results are complete. True: all other members are to be told. False: frozen, so the unit is not done.
  bool done(uint64_t unit);
  // A member says that it is done. Throws Error(kHandshake) for a unit that no rank of this view can have begun.
  void done_by(int place, uint64_t unit);
  // The units that every member has done: they are left now, and no longer open here. Empty while frozen.
  std::vector<uint64_t> leave();
  // How many operations outside units were called and have finished. Does nothing while frozen.
  void count_plain(uint64_t called, uint64_t finished);

  void freeze() { frozen_ = true; }
  bool frozen() const { return frozen_; }
  UnitReport report() const;
  // This rank's units in the view that `decision` makes: what stands is left, what is redone is open and not done.
  Units after(const ViewDecision& decision, int place) const;

 private:
  struct Unit {
    bool begun = false;  // false: a member is ahead of this rank
    MemberSet done;
  };

  MemberView view_;
  int self_;
  uint64_t next_;
  std::map<uint64_t, Unit> units_;
  uint64_t plain_called_ = 0;
  uint64_t plain_finished_ = 0;
  bool frozen_ = false;

  friend class StateBytes;
};

}  // namespace ringdp
