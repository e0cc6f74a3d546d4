#include "membership/votes.h"

#include <algorithm>
#include <cstddef>

namespace ringdp {

Votes::Votes(uint64_t view, int self, std::optional<ViewDecision> made_by) : self_(self) {
  VoteRecord fresh;
  fresh.view = view;
  fresh.made_by = std::move(made_by);
  hold(self, fresh);
}

void Votes::hold(int member, const VoteRecord& record) {
  votes_[member] = record;
  changed_.set(static_cast<std::size_t>(member));
}

MemberSet Votes::promise(const Ballot& ballot, const MemberSet& among) {
  MemberSet out;
  for (auto& [member, vote] : votes_) {
    if (!among[static_cast<std::size_t>(member)] || ballot < vote.promised) continue;
    out.set(static_cast<std::size_t>(member));
    if (vote.promised == ballot) continue;
    vote.promised = ballot;
    changed_.set(static_cast<std::size_t>(member));
  }
  return out;
}

MemberSet Votes::accept(const Ballot& ballot, const ViewDecision& decision, const MemberSet& among) {
  const MemberSet out = promise(ballot, among);
  for (auto& [member, vote] : votes_) {
    if (!out[static_cast<std::size_t>(member)] || vote.accepted_in == ballot) continue;
    vote.accepted_in = ballot;
    vote.accepted = decision;
    changed_.set(static_cast<std::size_t>(member));
  }
  return out;
}

MemberSet Votes::held() const {
  MemberSet out;
  for (const auto& [member, vote] : votes_) out.set(static_cast<std::size_t>(member));
  return out;
}

Ballot Votes::highest_promised() const {
  Ballot highest;
  for (const auto& [member, vote] : votes_) highest = std::max(highest, vote.promised);
  return highest;
}

std::pair<Ballot, std::optional<ViewDecision>> Votes::accepted(const MemberSet& among) const {
  std::pair<Ballot, std::optional<ViewDecision>> out;
  for (const auto& [member, vote] : votes_)
    if (among[static_cast<std::size_t>(member)] && out.first < vote.accepted_in)
      out = {vote.accepted_in, vote.accepted};
  return out;
}

std::vector<std::pair<int, VoteRecord>> Votes::take_changed() {
  std::vector<std::pair<int, VoteRecord>> out;
  for (const auto& [member, vote] : votes_)
    if (changed_[static_cast<std::size_t>(member)]) out.emplace_back(member, vote);
  changed_.reset();
  return out;
}

}  // namespace ringdp
