#include "membership/view_consensus.h"

#include <algorithm>
#include <functional>
#include <string>
#include <tuple>

#include "base/error.h"

namespace ringdp {
namespace {

using Type = ViewMessage::Type;

bool is_of(const MemberView& view, const Ballot& ballot) { return ballot.none() || ballot.member < view.size(); }

bool is_of(const MemberView& view, const MemberSet& members) { return (members & ~view.everybody()).none(); }

// A decision that this view can make: its members are some of the view's.
bool is_of(const MemberView& view, const std::optional<ViewDecision>& decision) {
  return !decision ||
         (decision->view == view.number + 1 &&
          std::includes(view.places.begin(), view.places.end(), decision->places.begin(), decision->places.end()));
}

// Whether a member of the view can have said this.
bool can_say(const MemberView& view, int from, const ViewMessage& it) {
  const bool by_leader = it.type == Type::kPrepare || it.type == Type::kAccept;
  return is_of(view, it.ballot) && is_of(view, it.promised) && is_of(view, it.votes) && is_of(view, it.decision) &&
         is_of(view, it.state.votes) && is_of(view, it.state.linked) && is_of(view, it.state.accepted_in) &&
         is_of(view, it.state.accepted) && (!by_leader || it.ballot.member == from);
}

ViewMessage made(Type type, uint64_t view, const Ballot& ballot = {}) {
  ViewMessage it;
  it.type = type;
  it.view = view;
  it.ballot = ballot;
  return it;
}

// What a dead member's page says of its vote in this view; none: nothing that can be used.
std::optional<VoteRecord> usable_record(const MemberView& view, std::span<const std::byte> bytes,
                                        const std::optional<ViewDecision>& made_by) {
  VoteRecord record;
  if (!bytes.empty()) {
    try {
      record = VoteRecord::decode(bytes);
    } catch (const Error&) {
      return std::nullopt;
    }
  }
  // It died before it came to this view, and has promised nothing in it.
  if (record.view < view.number) return VoteRecord{view.number, {}, {}, {}, made_by};
  if (record.view > view.number + 1) return record;
  const bool ahead = record.view == view.number + 1;  // so its page has the decision of this view
  if (ahead) return record.made_by && is_of(view, record.made_by) ? std::optional(record) : std::nullopt;
  const bool usable = record.view == view.number && is_of(view, record.promised) && is_of(view, record.accepted_in) &&
                      is_of(view, record.accepted);
  return usable ? std::optional(record) : std::nullopt;
}

int64_t later(int64_t now_ms, int64_t ms) {
  return ms >= ViewConsensus::kNever - now_ms ? ViewConsensus::kNever : now_ms + ms;
}

int own_member(const MemberView& view, int place) {
  const bool ascending =
      std::adjacent_find(view.places.begin(), view.places.end(), std::greater_equal<>()) == view.places.end();
  const bool possible =
      !view.places.empty() && view.places[0] >= 0 && view.places.size() <= kMaxMembers && view.number > 0;
  if (!ascending || !possible || view.member_of(place) < 0)
    throw Error(ErrorKind::kValue, "place " + std::to_string(place) + " is to agree in a view of " +
                                       std::to_string(view.size()) +
                                       " members: they are ascending places, its own "
                                       "among them, at most " +
                                       std::to_string(kMaxMembers));
  return view.member_of(place);
}

}  // namespace

ViewConsensus::ViewConsensus(MemberView view, int place, ViewConsensusOptions options)
    : view_(std::move(view)),
      self_(own_member(view_, place)),
      options_(options),
      units_(view_, place),
      votes_(view_.number, self_, std::nullopt) {
  tie_.by_store = options_.tie_by_store;
}

ViewConsensus ViewConsensus::next() const {
  const int place = view_.places[static_cast<std::size_t>(self_)];
  if (!decision_ || !decision_->keeps(place))
    throw Error(ErrorKind::kState, "no next view with place " + std::to_string(place) + " was decided");
  ViewConsensus out(decision_->view_made(), place, options_);
  out.now_ms_ = now_ms_;
  out.units_ = units_.after(*decision_, place);
  out.votes_ = Votes(out.view_.number, out.self_, decision_);
  return out;
}

void ViewConsensus::tick(int64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  if (decision_) return;
  if (leading_) advance();
  if (leading_ && now_ms_ >= resend_at_) {
    resend_at_ = later(now_ms_, options_.resend_ms);
    ViewMessage message = made(leading_->proposed() ? Type::kAccept : Type::kPrepare, view_.number, leading_->ballot());
    message.decision = leading_->proposed();
    for (int member = 0; member < view_.size(); ++member)
      if (member != self_ && !leading_->answered(member))
        outbox_.send(view_.places[static_cast<std::size_t>(member)], message);
  }
  if (!decision_ && now_ms_ >= attempt_at_) lead();
}

void ViewConsensus::suspect(int place) {
  const int member = view_.member_of(place);
  if (member < 0 || decision_ || suspects_[static_cast<std::size_t>(member)]) return;
  suspects_.set(static_cast<std::size_t>(member));
  want();
  if (!leading_) return look_for_leader();
  leading_->heard(self_, state_of(votes_.held()));
  advance();  // one answer fewer to wait for
}

void ViewConsensus::message(int from, const ViewMessage& it) {
  if (it.view != view_.number) return;
  const int member = view_.member_of(from);
  if (member < 0 || member == self_ || !can_say(view_, member, it))
    throw Error(ErrorKind::kHandshake, "received from place " + std::to_string(from) + " a " + it.text() +
                                           " that no member of view " + std::to_string(view_.number) + " sends");
  if (decision_) {
    if (it.asks()) outbox_.send(from, ViewMessage::decided(*decision_));
    return;
  }
  highest_round_ = std::max({highest_round_, it.ballot.round, it.promised.round});
  switch (it.type) {
    case Type::kSuspect:
      want();
      // Also where the member that this one follows asks: it has given its own ballot up.
      if (!leading_ && (!follows_another() || votes_.promised().member == member)) lead();
      return;
    case Type::kPrepare:
    case Type::kAccept:
      return follow(member, it);
    case Type::kState:
      if (!leading_ || leading_->ballot() != it.ballot) return;
      leading_->heard(member, it.state);
      return advance();
    case Type::kAccepted:
      if (!leading_ || leading_->ballot() != it.ballot) return;
      leading_->accepted_by(member, it.votes);
      return advance();
    case Type::kRefused:
      if (!leading_ || leading_->ballot() != it.ballot) return;
      leading_.reset();
      // Where the other leader is lost too, the survivors try again, not all at once.
      attempt_at_ = later(now_ms_, it.promised.none() || suspects_[static_cast<std::size_t>(it.promised.member)]
                                       ? options_.listen_ms * (1 + self_)
                                       : options_.patience_ms);
      return;
    case Type::kDecide:
      return decide(*it.decision);
  }
}

bool ViewConsensus::answer_for(int place, std::span<const std::byte> bytes) {
  const int member = view_.member_of(place);
  if (member < 0 || member == self_ || decision_) return false;
  const std::optional<VoteRecord> record = votes_.held()[static_cast<std::size_t>(member)]
                                               ? std::nullopt
                                               : usable_record(view_, bytes, votes_.own().made_by);
  if (record && record->view > view_.number + 1) {
    left_out_ = true;
  } else if (record && record->view > view_.number) {
    decide(*record->made_by);
  } else if (record) {
    votes_.hold(member, *record);
    vote_late(member);
  }
  suspect(place);
  return record.has_value();
}

void ViewConsensus::tie_granted(const std::vector<int>& places) {
  if (!tie_.by_store || tie_.granted.any()) return;
  for (const int place : places)
    if (const int member = view_.member_of(place); member >= 0) tie_.granted.set(static_cast<std::size_t>(member));
  if (leading_) advance();
}

ViewConsensus::Output ViewConsensus::take_output() {
  Output out;
  for (const auto& [member, record] : votes_.take_changed())
    out.records.emplace_back(view_.places[static_cast<std::size_t>(member)], record.encode());
  out.messages = outbox_.take();
  return out;
}

int64_t ViewConsensus::next_tick_ms() const {
  if (decision_) return kNever;
  int64_t next = attempt_at_;
  if (!leading_) return next;
  next = std::min(next, resend_at_);
  for (const int64_t ms : {options_.listen_ms, options_.collect_ms})
    if (const int64_t at = later(leading_->began_ms(), ms); at > now_ms_) next = std::min(next, at);
  return next;
}

std::optional<std::vector<int>> ViewConsensus::wants_tie() const {
  if (!tie_.by_store || tie_.granted.any() || !leading_ || decision_) return std::nullopt;
  const MemberSet votes = leading_->votes();
  if (2 * votes.count() != static_cast<std::size_t>(view_.size())) return std::nullopt;
  const bool waited = now_ms_ >= later(leading_->began_ms(), options_.listen_ms);
  if (!leading_->all_answered(view_.everybody() & ~suspects_) || !waited) {
    if (now_ms_ < later(leading_->began_ms(), options_.collect_ms)) return std::nullopt;
  }
  return view_.places_of(votes);
}

ViewConsensus::Standing ViewConsensus::standing() const {
  Standing out;
  if (decision_) return out;
  out.since_ms = undecided_since_;
  out.leads = leading_.has_value();
  out.left_out = left_out_;
  if (leading_) out.votes = leading_->votes().count();
  for (int member = 0; member < view_.size(); ++member) {
    const bool lost = member == self_ || suspects_[static_cast<std::size_t>(member)];
    const bool leads = follows_another() ? member == votes_.promised().member : out.waiting_for.empty();
    if (!lost && (leading_ ? !leading_->answered(member) : leads))
      out.waiting_for.push_back(view_.places[static_cast<std::size_t>(member)]);
  }
  return out;
}

void ViewConsensus::want() { undecided_since_ = std::min(undecided_since_, now_ms_); }

// Another leads the ballot that this rank's vote has promised to follow, and is not lost to it.
bool ViewConsensus::follows_another() const {
  const Ballot& promised = votes_.promised();
  return !promised.none() && promised.member != self_ && !suspects_[static_cast<std::size_t>(promised.member)];
}

void ViewConsensus::look_for_leader() {
  attempt_at_ = std::min(attempt_at_, later(now_ms_, options_.patience_ms));
  if (follows_another()) return;
  int leader = 0;
  while (leader < view_.size() && suspects_[static_cast<std::size_t>(leader)]) ++leader;
  if (leader == self_ || leader == view_.size()) return lead();
  outbox_.send(view_.places[static_cast<std::size_t>(leader)], made(Type::kSuspect, view_.number));
}

void ViewConsensus::lead() {
  want();
  if (options_.rules->freezes) units_.freeze();
  const Ballot ballot{++highest_round_, self_};
  leading_.emplace(ballot, now_ms_);
  attempt_at_ = kNever;
  resend_at_ = later(now_ms_, options_.resend_ms);
  leading_->heard(self_, state_of(votes_.promise(ballot, votes_.held())));
  outbox_.send_all(view_, self_, made(Type::kPrepare, view_.number, ballot));
  advance();
}

void ViewConsensus::follow(int leader, const ViewMessage& it) {
  const int place = view_.places[static_cast<std::size_t>(leader)];
  want();
  if (it.ballot < votes_.promised()) {
    ViewMessage answer = made(Type::kRefused, view_.number, it.ballot);
    answer.promised = votes_.promised();
    return outbox_.send(place, answer);
  }
  leading_.reset();
  if (options_.rules->freezes) units_.freeze();
  attempt_at_ = later(now_ms_, options_.patience_ms);
  ViewMessage answer = made(it.type == Type::kPrepare ? Type::kState : Type::kAccepted, view_.number, it.ballot);
  if (it.type == Type::kPrepare)
    answer.state = state_of(votes_.promise(it.ballot, votes_.held()));
  else
    answer.votes = votes_.accept(it.ballot, *it.decision, votes_.held());
  outbox_.send(place, answer);
}

// A dead member's vote was taken over while a ballot is under way: it answers what this rank's own vote has answered.
void ViewConsensus::vote_late(int member) {
  const VoteRecord own = votes_.own();
  if (own.promised.none()) return;
  MemberSet vote;
  vote.set(static_cast<std::size_t>(member));
  const bool accepts = own.accepted_in == own.promised;
  const MemberSet got = accepts ? votes_.accept(own.promised, *own.accepted, vote) : votes_.promise(own.promised, vote);
  const bool leads = leading_ && leading_->ballot() == own.promised;
  if (got.none()) {  // it has promised more
    highest_round_ = std::max(highest_round_, votes_.highest_promised().round);
    if (leads) lead();
    return;
  }
  ViewMessage answer = made(accepts ? Type::kAccepted : Type::kState, view_.number, own.promised);
  if (accepts)
    answer.votes = got;
  else
    answer.state = state_of(got);
  if (own.promised.member != self_)
    return outbox_.send(view_.places[static_cast<std::size_t>(own.promised.member)], answer);
  if (!leads) return;
  accepts ? leading_->accepted_by(self_, got) : leading_->heard(self_, answer.state);
  advance();
}

void ViewConsensus::advance() {
  const auto heard_enough = [&](int64_t listen_ms) {
    const int64_t waited = now_ms_ - leading_->began_ms();
    return waited >= options_.collect_ms ||
           (waited >= listen_ms && leading_->all_answered(view_.everybody() & ~suspects_));
  };
  const auto quorum = [&] { return options_.rules->is_quorum(leading_->votes(), view_, tie_); };
  if (!leading_->proposed()) {
    if (!heard_enough(options_.listen_ms) || !quorum()) return;
    const ViewDecision decision = options_.rules->choose(view_, leading_->states());
    leading_->propose(decision, now_ms_);
    leading_->accepted_by(self_, votes_.accept(leading_->ballot(), decision, votes_.held()));
    ViewMessage message = made(Type::kAccept, view_.number, leading_->ballot());
    message.decision = decision;
    outbox_.send_all(view_, self_, message);
    resend_at_ = later(now_ms_, options_.resend_ms);
  }
  if (quorum()) decide(ViewDecision(*leading_->proposed()));
}

// Each member that hears it passes it on once.
void ViewConsensus::decide(const ViewDecision& decision) {
  if (decision_) return;
  decision_ = decision;
  units_.freeze();
  leading_.reset();
  outbox_.send_all(view_, self_, ViewMessage::decided(*decision_));
}

MemberAnswer ViewConsensus::state_of(const MemberSet& votes) const {
  MemberAnswer out;
  out.votes = votes;
  out.linked = view_.everybody() & ~suspects_;
  out.units = units_.report();
  out.cause = cause_;
  std::tie(out.accepted_in, out.accepted) = votes_.accepted(votes);
  return out;
}

}  // namespace ringdp
