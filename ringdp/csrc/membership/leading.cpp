#include "membership/leading.h"

namespace ringdp {

void Leading::heard(int member, const MemberAnswer& state) {
  if (proposed_) return;
  answered_.set(static_cast<std::size_t>(member));
  const auto [found, first] = states_.try_emplace(member, state);
  if (first) return;
  // Its units were frozen when it answered first.
  found->second.votes |= state.votes;
  found->second.linked &= state.linked;
  if (!(found->second.accepted_in < state.accepted_in)) return;
  found->second.accepted_in = state.accepted_in;
  found->second.accepted = state.accepted;
}

void Leading::accepted_by(int member, const MemberSet& votes) {
  if (!proposed_) return;
  answered_.set(static_cast<std::size_t>(member));
  accepted_ |= votes;
}

void Leading::propose(ViewDecision decision, int64_t now_ms) {
  proposed_ = std::move(decision);
  began_ms_ = now_ms;
  answered_.reset();
}

MemberSet Leading::votes() const {
  if (proposed_) return accepted_;
  MemberSet out;
  for (const auto& [member, state] : states_) out |= state.votes;
  return out;
}

void Outbox::send_all(const MemberView& view, int but, const ViewMessage& message) {
  for (int member = 0; member < view.size(); ++member)
    if (member != but) send(view.places[static_cast<std::size_t>(member)], message);
}

}  // namespace ringdp
