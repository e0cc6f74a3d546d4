// What of a ViewConsensus decides how it goes on, as bytes. A new member of these classes has to be added here, or the explorer
// of the tests takes two states for one.
#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "membership/view_consensus.h"

namespace ringdp {

class StateBytes {
 public:
  void number(uint64_t value) {
    out_.resize(out_.size() + sizeof(value));
    put(out_.data() + out_.size() - sizeof(value), value);
  }
  void bytes(const std::vector<std::byte>& value) {
    number(value.size());
    out_.insert(out_.end(), value.begin(), value.end());
  }
  void set(const MemberSet& members) {
    for (std::size_t member = 0; member < members.size(); member += 64)
      number(((members >> member) & MemberSet(~0ULL)).to_ullong());
  }
  void decision(const std::optional<ViewDecision>& decision) {
    ViewMessage message;
    message.type = ViewMessage::Type::kDecide;
    message.decision = decision;
    bytes(message.encode());
  }
  void units(const Units& units) {
    number(units.next_);
    number(units.frozen_ ? 1 : 0);
    number(units.plain_called_);
    number(units.plain_finished_);
    number(units.units_.size());
    for (const auto& [unit, it] : units.units_) {
      number(unit);
      number(it.begun ? 1 : 0);
      set(it.done);
    }
  }
  void leading(const Leading& it, int64_t now_ms, int64_t longest_ms) {
    number(it.ballot_.round);
    number(static_cast<uint64_t>(std::min(now_ms - it.began_ms_, longest_ms)));
    set(it.answered_);
    set(it.accepted_);
    decision(it.proposed_);
    if (it.proposed_) return;  // the states have served
    for (const auto& [member, state] : it.states_) {
      ViewMessage message;
      message.type = ViewMessage::Type::kState;
      message.ballot = {1, member};
      message.state = state;
      bytes(message.encode());
    }
  }
  std::vector<std::byte> of(const ViewConsensus& it) {
    number(it.view_.number);
    for (const int place : it.view_.places) number(static_cast<uint64_t>(place));
    number(static_cast<uint64_t>(it.self_));
    units(it.units_);
    decision(it.decision_);
    if (it.decision_) return std::move(out_);  // it only repeats that
    for (const auto& [member, record] : it.votes_.votes_) {
      number(static_cast<uint64_t>(member));
      bytes(record.encode());
    }
    set(it.suspects_);
    set(it.tie_.granted);
    number(it.highest_round_);
    number(hash_text(it.cause_));
    number(it.left_out_ ? 1 : 0);
    for (const int64_t at : {it.attempt_at_, it.leading_ ? it.resend_at_ : ViewConsensus::kNever})
      number(static_cast<uint64_t>(at == ViewConsensus::kNever ? -1 : std::max<int64_t>(at - it.now_ms_, 0)));
    if (it.leading_) leading(*it.leading_, it.now_ms_, std::max(it.options_.listen_ms, it.options_.collect_ms));
    return std::move(out_);
  }

 private:
  std::vector<std::byte> out_;
};

std::vector<std::byte> state_bytes(const ViewConsensus& change) { return StateBytes().of(change); }

}  // namespace ringdp
