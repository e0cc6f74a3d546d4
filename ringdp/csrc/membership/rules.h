// The rules on which the agreement of a view rests, as functions of values: what a quorum is, and what a leader proposes.
// The tests show that the explorer finds wrong ones, and so they are given to a ViewConsensus. Any thread.
#pragma once

#include <map>

#include "membership/messages.h"

namespace ringdp {

// Who wins where exactly half of the votes are there: the half with the view's lowest place; or the one set of places to which
// a store outside the ranks has granted the view's tie vote.
struct Tie {
  bool by_store = false;
  MemberSet granted;  // none: not asked for, or not answered
};

using MemberAnswers = std::map<int, MemberAnswer>;  // by member

// More than half of the view's votes, or half and the tie. Any two quorums of a view have a vote in common.
bool is_quorum(const MemberSet& votes, const MemberView& view, const Tie& tie);

// The members whose states are there, without as few as possible, so that those that remain are connected pairwise.
MemberSet connected(const MemberAnswers& states);

// What has to be proposed after these states: the decision that a vote has accepted in the highest ballot, or else a new one of
// those that are connected. A unit stands if all of these are done; otherwise none has left it, and they redo it.
ViewDecision choose(const MemberView& view, const MemberAnswers& states);

struct ViewRules {
  bool freezes = true;  // who takes part in a change is frozen
  bool (*is_quorum)(const MemberSet&, const MemberView&, const Tie&) = ringdp::is_quorum;
  ViewDecision (*choose)(const MemberView&, const MemberAnswers&) = ringdp::choose;
};
inline constexpr ViewRules kViewRules;

}  // namespace ringdp
