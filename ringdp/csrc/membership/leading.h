// Leading: what a member that leads a ballot has heard, first the members' states, then who has accepted its proposal.
// Value type without threads; owned by the ViewConsensus of its view.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "membership/messages.h"
#include "membership/rules.h"

namespace ringdp {

class Leading {
 public:
  Leading(const Ballot& ballot, int64_t now_ms) : ballot_(ballot), began_ms_(now_ms) {}

  // Both may come in parts: a member answers late for a dead one, or has lost another meanwhile.
  void heard(int member, const MemberAnswer& state);
  void accepted_by(int member, const MemberSet& votes);
  void propose(ViewDecision decision, int64_t now_ms);

  const Ballot& ballot() const { return ballot_; }
  const MemberAnswers& states() const { return states_; }
  const std::optional<ViewDecision>& proposed() const { return proposed_; }
  int64_t began_ms() const { return began_ms_; }  // this phase
  // The votes that have answered in this phase.
  MemberSet votes() const;
  bool all_answered(const MemberSet& expected) const { return (expected & ~answered_).none(); }
  bool answered(int member) const { return answered_[static_cast<std::size_t>(member)]; }

 private:
  Ballot ballot_;
  int64_t began_ms_;
  MemberAnswers states_;
  MemberSet answered_;                    // members, in this phase
  std::optional<ViewDecision> proposed_;  // none: states are being collected
  MemberSet accepted_;

  friend class StateBytes;
};

// Messages to be sent, in order.
class Outbox {
 public:
  void send(int place, const ViewMessage& message) { messages_.emplace_back(place, message); }
  void send_all(const MemberView& view, int but, const ViewMessage& message);
  std::vector<std::pair<int, ViewMessage>> take() { return std::exchange(messages_, {}); }

 private:
  std::vector<std::pair<int, ViewMessage>> messages_;
};

}  // namespace ringdp
