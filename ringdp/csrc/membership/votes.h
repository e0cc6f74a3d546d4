// Votes: the acceptors for which one process answers in one view: its own member's, and those of members of its host that are
// certainly dead, whose votes it has read from their pages. No two processes answer for one vote at a time.
// Value type without threads; owned by the ViewConsensus of its view.
#pragma once

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "membership/messages.h"

namespace ringdp {

class Votes {
 public:
  Votes(uint64_t view, int self, std::optional<ViewDecision> made_by);

  void hold(int member, const VoteRecord& record);  // from now on this process answers for it
  // Each vote that has promised no higher ballot promises this one, or accepts. Which did so:
  MemberSet promise(const Ballot& ballot, const MemberSet& among);
  MemberSet accept(const Ballot& ballot, const ViewDecision& decision, const MemberSet& among);

  MemberSet held() const;
  const Ballot& promised() const { return votes_.at(self_).promised; }  // by its own vote
  Ballot highest_promised() const;                                      // by any
  const VoteRecord& own() const { return votes_.at(self_); }
  // The highest that one of these votes has accepted.
  std::pair<Ballot, std::optional<ViewDecision>> accepted(const MemberSet& among) const;
  // What has changed since the last call, to be written into the members' pages.
  std::vector<std::pair<int, VoteRecord>> take_changed();

 private:
  int self_;
  std::map<int, VoteRecord> votes_;  // by member
  MemberSet changed_;

  friend class StateBytes;
};

}  // namespace ringdp
