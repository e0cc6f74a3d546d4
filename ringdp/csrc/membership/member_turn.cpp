#include "membership/member_turn.h"

#include <algorithm>
#include <utility>

namespace ringdp {
namespace {

bool contains(const std::vector<int>& list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// All members of a view are connected: of two that are not, the lower one stays.
std::vector<int> reaching_each_other(const std::vector<int>& living, const std::map<int, MemberState>& states) {
  std::vector<int> left_out;
  for (const int one : living)
    for (const int other : states.at(one).lost)
      if (contains(living, other) && !contains(left_out, one) && !contains(left_out, other))
        left_out.push_back(std::max(one, other));
  std::vector<int> staying;
  for (const int one : living)
    if (!contains(left_out, one)) staying.push_back(one);
  return staying;
}

std::string decision_key(uint64_t view) { return std::to_string(view) + "/decision"; }

std::string state_key(uint64_t view, int member) { return std::to_string(view) + "/state/" + std::to_string(member); }

}  // namespace

StoreRequest decision_request(uint64_t view, const Decision& decision, const AgreementRules& rules) {
  const auto kind = rules.first_counts ? StoreRequest::Kind::kSetFirst : StoreRequest::Kind::kSet;
  return {kind, decision_key(view), decision.encode()};
}

double agreement_pause_s(double last_s, std::size_t members) {
  constexpr double kShortest = 0.5e-3, kLongest = 10e-3, kLongestOfEach = 0.15e-3;
  return std::clamp(1.5 * last_s, kShortest, std::max(kLongest, kLongestOfEach * static_cast<double>(members)));
}

MemberTurn::MemberTurn(uint64_t view, std::vector<int> members, int self, const MemberState& mine,
                       const AgreementRules& rules)
    : view_(view),
      members_(std::move(members)),
      self_(self),
      mine_(mine),
      rules_(rules),
      request_{StoreRequest::Kind::kSet, state_key(view, self), mine.encode()},
      lost_(mine.lost) {
  said_[self] = request_.value;
}

void MemberTurn::lose(const std::vector<int>& unreachable) {
  for (const int member : unreachable)
    if (!contains(lost_, member)) lost_.push_back(member);
}

void MemberTurn::answer(const std::optional<std::string>& value) {
  switch (stage_) {
    case Stage::kSay:
      return look();
    case Stage::kLook:
      if (value)
        decision_ = Decision::decode(*value);
      else
        begin_round();
      return;
    case Stage::kCollect:
      if (value)
        said_[unasked_.front()] = *value;
      else
        waiting_for_.push_back(unasked_.front());
      unasked_.erase(unasked_.begin());
      return collect();
    case Stage::kDecide:
      decision_ = Decision::decode(value.value_or(request_.value));
  }
}

void MemberTurn::look() {
  stage_ = Stage::kLook;
  request_ = {StoreRequest::Kind::kFind, decision_key(view_), ""};
}

// The lowest connected member collects the others' states. The others read its decision.
void MemberTurn::begin_round() {
  living_.clear();
  waiting_for_.clear();
  unasked_.clear();
  for (const int member : members_)
    if (!contains(lost_, member)) living_.push_back(member);
  if (living_.front() != self_) {
    waiting_for_.push_back(living_.front());
    return look();
  }
  for (const int member : living_)
    if (!said_.contains(member)) unasked_.push_back(member);
  collect();
}

void MemberTurn::collect() {
  if (!unasked_.empty()) {
    stage_ = Stage::kCollect;
    request_ = {StoreRequest::Kind::kFind, state_key(view_, unasked_.front()), ""};
  } else if (waiting_for_.empty() || !rules_.waits) {
    decide();
  } else if (rules_.looks) {
    look();
  } else {
    begin_round();
  }
}

void MemberTurn::decide() {
  std::map<int, MemberState> states;
  for (const int member : living_)
    states[member] = said_.contains(member) ? MemberState::decode(said_.at(member)) : mine_;
  const std::vector<int> staying = reaching_each_other(living_, states);
  std::vector<MemberState> theirs;
  for (const int member : staying) theirs.push_back(states.at(member));
  waiting_for_.clear();
  stage_ = Stage::kDecide;
  request_ = decision_request(view_, rules_.decide(staying, theirs), rules_);
}

std::string MemberTurn::key() const {
  std::string key =
      std::to_string(view_) + "/" + std::to_string(static_cast<int>(stage_)) + request_.key + "=" + request_.value;
  const auto add = [&](const std::vector<int>& list) {
    key += ';';
    for (const int one : list) key += std::to_string(one) + ',';
  };
  auto lost = lost_;
  std::sort(lost.begin(), lost.end());
  add(lost);
  if (stage_ == Stage::kCollect) {  // a round's beginnings are forgotten when it ends
    add(living_);
    add(unasked_);
    add(waiting_for_);
  }
  for (const auto& [member, text] : said_) key += std::to_string(member) + ":" + text;
  return key;
}

}  // namespace ringdp
