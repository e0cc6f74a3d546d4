#include "membership/rules.h"

#include <algorithm>
#include <string>

namespace ringdp {
namespace {

enum class Standing : uint8_t { kUnknown, kOpen, kDone, kLeft };

Standing standing(const UnitReport& report, uint64_t unit) {
  if (unit >= report.next) return Standing::kUnknown;
  for (const auto& open : report.open)
    if (open.unit == unit) return open.done ? Standing::kDone : Standing::kOpen;
  return Standing::kLeft;
}

bool linked(const MemberAnswers& states, int a, int b) {
  return states.at(a).linked[static_cast<std::size_t>(b)] && states.at(b).linked[static_cast<std::size_t>(a)];
}

// Units that a member has open, or has begun while another has not.
std::vector<UnitOutcome> outcomes(const MemberAnswers& states, const MemberSet& members) {
  std::vector<const UnitReport*> reports;
  for (const auto& [member, state] : states)
    if (members[static_cast<std::size_t>(member)]) reports.push_back(&state.units);
  std::vector<uint64_t> numbers;
  for (const UnitReport* report : reports)
    for (const auto& open : report->open) numbers.push_back(open.unit);
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  std::vector<UnitOutcome> out;
  for (const uint64_t unit : numbers) {
    const bool stands = std::all_of(reports.begin(), reports.end(),
                                    [&](const auto* report) { return standing(*report, unit) >= Standing::kDone; });
    out.push_back({unit, !stands});
  }
  return out;
}

bool must_replay(const MemberAnswers& states, const MemberSet& members) {
  const UnitReport* first = nullptr;
  for (const auto& [member, state] : states) {
    if (!members[static_cast<std::size_t>(member)]) continue;
    if (state.units.plain_called != state.units.plain_finished) return true;
    if (first != nullptr && first->plain_called != state.units.plain_called) return true;
    first = &state.units;
  }
  return false;
}

std::string shortest_cause(const MemberAnswers& states) {
  std::string out;
  for (const auto& [member, state] : states)
    if (!state.cause.empty() && (out.empty() || state.cause.size() < out.size())) out = state.cause;
  return out;
}

}  // namespace

bool is_quorum(const MemberSet& votes, const MemberView& view, const Tie& tie) {
  const std::size_t twice = 2 * votes.count();
  const auto size = static_cast<std::size_t>(view.size());
  if (twice != size) return twice > size;
  return tie.by_store ? votes == tie.granted : votes[0];
}

MemberSet connected(const MemberAnswers& states) {
  MemberSet members;
  for (const auto& [member, state] : states)
    if (linked(states, member, member)) members.set(static_cast<std::size_t>(member));
  while (true) {
    int fewest = -1;
    std::size_t links = 0;
    for (const auto& [member, state] : states) {
      if (!members[static_cast<std::size_t>(member)]) continue;
      std::size_t own = 0;
      for (const auto& [other, its] : states)
        if (members[static_cast<std::size_t>(other)] && linked(states, member, other)) ++own;
      if (fewest < 0 || own <= links) {  // the higher of two
        fewest = member;
        links = own;
      }
    }
    if (fewest < 0 || links == members.count()) return members;
    members.reset(static_cast<std::size_t>(fewest));
  }
}

ViewDecision choose(const MemberView& view, const MemberAnswers& states) {
  const MemberAnswer* latest = nullptr;
  for (const auto& [member, state] : states)
    if (state.accepted && (latest == nullptr || latest->accepted_in < state.accepted_in)) latest = &state;
  if (latest != nullptr) return *latest->accepted;
  const MemberSet members = connected(states);
  ViewDecision decision{view.number + 1, view.places_of(members), outcomes(states, members),
                        must_replay(states, members), shortest_cause(states)};
  if (decision.units.size() > kMaxOutcomes) {  // more than ranks that are a unit apart can have
    decision.units.resize(kMaxOutcomes);
    decision.replay = true;
  }
  return decision;
}

}  // namespace ringdp
