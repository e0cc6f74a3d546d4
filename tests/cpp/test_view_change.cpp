// How members agree on the next view: all that can happen to two and three of them, random schedules of four and five, the
// messages of the protocol as bytes, and how long it takes. RINGDP_EXPLORE=N explores N times as many states (0: all), and
// RINGDP_SEED chooses the schedules.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <set>

#include "base/text.h"
#include "testing.h"
#include "view_change_explorer.h"
#include "view_change_model.h"

namespace ringdp::testing {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kSlowness = 20;
#else
constexpr uint64_t kSlowness = 1;
#endif

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

MemberSet set_of(std::initializer_list<int> members) {
  MemberSet out;
  for (const int member : members) out.set(static_cast<std::size_t>(member));
  return out;
}

ViewMessage message_of(ViewMessage::Type type, Ballot ballot = {}, uint64_t view = 1) {
  ViewMessage it;
  it.type = type;
  it.view = view;
  it.ballot = ballot;
  return it;
}

std::vector<ViewMessage> all_kinds() {
  const ViewDecision decision{2, {0, 3, 7}, {{5, false}, {6, true}}, true, "it was killed"};
  std::vector<ViewMessage> all{
      message_of(ViewMessage::Type::kSuspect),          message_of(ViewMessage::Type::kPrepare, {3, 1}),
      message_of(ViewMessage::Type::kState, {3, 1}),    message_of(ViewMessage::Type::kAccept, {3, 1}),
      message_of(ViewMessage::Type::kAccepted, {3, 1}), message_of(ViewMessage::Type::kDecide),
      message_of(ViewMessage::Type::kRefused, {3, 1}),  message_of(ViewMessage::Type::kState, {3, 1})};
  all[2].state = {set_of({0, 255}), set_of({0, 1, 2}), {7, {{5, true}, {6, false}}, 12, 11},
                  {2, 0},           decision,          "rank 3 is lost"};
  all[3].decision = all[5].decision = decision;
  all[4].votes = set_of({1, 2, 64});
  all[6].promised = {4, 0};
  return all;
}

CASE("what members tell each other survives the wire; half of it, more of it and other bytes are refused") {
  std::mt19937_64 random(1);
  for (const ViewMessage& message : all_kinds()) {
    const std::vector<std::byte> raw = message.encode();
    CHECK(ViewMessage::decode(raw) == message);
    for (std::size_t bytes = 0; bytes < raw.size(); ++bytes)
      CHECK_THROWS(ErrorKind::kHandshake, ViewMessage::decode(std::span(raw).first(bytes)));
    std::vector<std::byte> longer = raw;
    longer.push_back({});
    CHECK_THROWS(ErrorKind::kHandshake, ViewMessage::decode(longer));
    for (int i = 0; i < 2000; ++i) {
      std::vector<std::byte> other = raw;
      for (uint64_t flips = random() % 4 + 1; flips > 0; --flips)
        other[random() % other.size()] = static_cast<std::byte>(random());
      try {
        CHECK(ViewMessage::decode(other).encode() == other);  // another message, whole
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kHandshake);
      }
    }
  }
  CHECK_THROWS(ErrorKind::kHandshake, ViewMessage::decode(std::vector<std::byte>(kMessageBytes + 1)));
}

CASE("the largest message and the largest page have room") {
  ViewDecision decision{2, {}, {}, false, std::string(kCauseBytes, 'x')};
  for (int place = 0; place < static_cast<int>(kMaxMembers); ++place) decision.places.push_back(place);
  for (uint64_t unit = 1; unit <= kMaxOutcomes; ++unit) decision.units.push_back({unit, true});
  ViewMessage message = message_of(ViewMessage::Type::kState, {1, 0});
  message.state.accepted_in = {1, 0};
  message.state.accepted = decision;
  for (uint64_t unit = 1; unit <= kMaxOpenUnits; ++unit) message.state.units.open.push_back({unit, true});
  message.state.units.next = kMaxOpenUnits + 1;
  message.state.cause = decision.cause;
  CHECK(ViewMessage::decode(message.encode()) == message);
  const VoteRecord record{2, {1, 0}, {1, 0}, decision, decision};
  CHECK(VoteRecord::decode(record.encode()) == record);
}

CASE("what no member of the view sends is refused, and changes nothing") {
  ViewConsensus change({1, {0, 3, 7}}, 3);
  const auto before = state_bytes(change);
  const auto refused = [&](int from, const ViewMessage& message) {
    CHECK_THROWS(ErrorKind::kHandshake, change.message(from, message));
    CHECK(state_bytes(change) == before);
  };
  refused(5, message_of(ViewMessage::Type::kSuspect));           // not a member
  refused(3, message_of(ViewMessage::Type::kSuspect));           // itself
  refused(0, message_of(ViewMessage::Type::kPrepare, {1, 2}));   // another's ballot
  refused(0, message_of(ViewMessage::Type::kAccepted, {1, 3}));  // a member that the view has not
  ViewMessage accept = message_of(ViewMessage::Type::kAccept, {1, 0});
  accept.decision = ViewDecision{2, {0, 5}, {}, false, {}};
  refused(0, accept);
  accept.decision = ViewDecision{3, {0, 3}, {}, false, {}};
  refused(0, accept);
  change.message(0, message_of(ViewMessage::Type::kPrepare, {1, 0}, 2));  // of another view: passed over
  CHECK(state_bytes(change) == before);
  CHECK_THROWS(ErrorKind::kValue, ViewConsensus({1, {0, 1}}, 2));
  CHECK_THROWS(ErrorKind::kValue, ViewConsensus({1, {1, 0}}, 0));
  CHECK_THROWS(ErrorKind::kHandshake, change.units().done_by(0, 17));
  CHECK_THROWS(ErrorKind::kHandshake, change.units().done_by(1, 1));
}

CASE("any two quorums of a view have a vote in common") {
  for (int members = 1; members <= 6; ++members) {
    MemberView view;
    for (int place = 0; place < members; ++place) view.places.push_back(place);
    const unsigned all = 1U << members;
    for (unsigned granted = 0; granted <= all; ++granted) {
      const Tie tie{granted < all, MemberSet(granted < all ? granted : 0)};
      for (unsigned a = 0; a < all; ++a)
        for (unsigned b = 0; b < a; ++b)
          CHECK((a & b) != 0 || !is_quorum(MemberSet(a), view, tie) || !is_quorum(MemberSet(b), view, tie));
      CHECK(is_quorum(view.everybody(), view, tie));
    }
  }
}

CASE("who is not connected to all others of those that remain is not kept") {
  MemberAnswers states;
  for (int member = 0; member < 4; ++member) states[member].linked = set_of({0, 1, 2, 3});
  CHECK(connected(states) == set_of({0, 1, 2, 3}));
  states[3].linked.reset(1);  // one of two goes: the higher
  CHECK(connected(states) == set_of({0, 1, 2}));
  states[0].linked.reset(1);
  CHECK(connected(states) == set_of({0, 2, 3}));
  states[2].linked.reset(2);  // it leaves by itself
  CHECK(connected(states) == set_of({0, 3}));
}

CASE("a unit stands if all that remain are done, and an operation outside units is known to all") {
  const MemberView view{1, {0, 1, 2}};
  MemberAnswers states;
  for (int member = 0; member < 3; ++member) states[member].linked = set_of({0, 1, 2});
  states[0].units = {6, {{4, true}, {5, false}}, 9, 9};  // 4 may have been left by others
  states[1].units = {6, {{5, true}}, 9, 9};
  states[2].units = {5, {{4, true}}, 9, 9};  // has not begun 5
  states[0].cause = "the connection ended";
  states[2].cause = "killed";
  const ViewDecision decision = choose(view, states);
  CHECK(decision == ViewDecision({2, {0, 1, 2}, {{4, false}, {5, true}}, false, "killed"}));
  states[1].units.plain_finished = 8;
  CHECK(choose(view, states).replay);
  states[1].units.plain_called = 8;
  CHECK(choose(view, states).replay);
  states[2].accepted_in = {1, 1};
  states[2].accepted = ViewDecision{2, {1, 2}, {}, false, {}};
  CHECK(choose(view, states) == *states[2].accepted);
}

Explorer::Result explore(Limits limits) {
  const uint64_t times = setting("RINGDP_EXPLORE", 1);
  limits.most_states = times == 0 ? SIZE_MAX : limits.most_states * times / kSlowness;
  const Explorer::Result result = Explorer(limits).run();
  std::printf("     %8zu states %s (%zu decided, %zu of them redo): %s\n", result.states,
              !result.violation.empty() ? "until it was found"
              : result.to_the_end       ? "to the end"
                                        : "stopped there",
              result.decided, result.redone, limits.name);
  return result;
}

void holds(const Limits& limits, bool to_the_end) {
  const Explorer::Result result = explore(limits);
  CHECK_EQ(result.violation, std::string());
  for (const std::string& step : result.steps) std::printf("       %s\n", step.c_str());
  CHECK(result.decided > 0);
  if (to_the_end && kSlowness == 1) CHECK(result.to_the_end);
}

CASE("two members, to the end") {
  Limits limits;
  limits.name = "2 members, 2 ballots, any suspicion";
  holds(limits, true);
}

CASE("two members of one host, either dies, to the end") {
  Limits limits;
  limits.name = "2 members of one host, 1 dies, 2 units";
  limits.units = 2;
  limits.suspicions = 0;
  limits.crashes = 1;
  limits.pages = true;
  limits.rounds = 3;
  holds(limits, true);
}

CASE("two members, the store has the tie vote, to the end") {
  Limits limits;
  limits.name = "2 members, tie vote in the store";
  limits.tie_by_store = true;
  holds(limits, true);
}

CASE("two members, two changes, two units") {
  Limits limits;
  limits.name = "2 members, 2 changes, 2 units";
  limits.changes = 2;
  limits.units = 2;
  holds(limits, false);
}

CASE("three members, one suspicion, right or wrong") {
  Limits limits;
  limits.name = "3 members, 1 suspicion, 2 ballots";
  limits.members = 3;
  limits.suspicions = 1;
  limits.most_states = 200'000;
  holds(limits, false);
}

CASE("three members, two suspicions, two of them lead") {
  Limits limits;
  limits.name = "3 members, 2 suspicions, 2 ballots";
  limits.members = 3;
  limits.most_states = 200'000;
  holds(limits, false);
}

CASE("three members that agree on their membership alone") {
  Limits limits;
  limits.name = "3 members, 2 suspicions, 2 ballots, no unit";
  limits.members = 3;
  limits.units = 0;
  limits.most_states = 200'000;
  holds(limits, false);
}

CASE("three members of one host, one after the other dies, two changes") {
  Limits limits;
  limits.name = "3 members of one host, 2 die, 2 changes";
  limits.members = 3;
  limits.suspicions = 0;
  limits.crashes = 2;
  limits.changes = 2;
  limits.pages = true;
  limits.rounds = 3;
  limits.most_states = 200'000;
  holds(limits, false);
}

bool any_half(const MemberSet& votes, const MemberView& view, const Tie&) {
  return 2 * votes.count() >= static_cast<std::size_t>(view.size());
}

ViewDecision ignores_accepted(const MemberView& view, const MemberAnswers& states) {
  MemberAnswers without = states;
  for (auto& [member, state] : without) state.accepted.reset();
  return choose(view, without);
}

ViewDecision any_done_commits(const MemberView& view, const MemberAnswers& states) {
  ViewDecision decision = choose(view, states);
  for (UnitOutcome& outcome : decision.units)
    for (const auto& [member, state] : states)
      for (const auto& open : state.units.open)
        if (open.unit == outcome.unit && open.done) outcome.redo = false;
  return decision;
}

void is_found(Limits limits) {
  limits.most_states = 400'000 * kSlowness;
  const Explorer::Result result = explore(limits);
  CHECK(!result.violation.empty());
  std::printf("       %s, after %zu steps\n", result.violation.c_str(), result.steps.size());
}

CASE("mutant found: who takes part in a change is not frozen") {
  Limits limits;
  limits.name = "mutant: no freeze";
  limits.rules.freezes = false;
  is_found(limits);
}

CASE("mutant found: a leader proposes what it likes, whatever was accepted") {
  Limits limits;
  limits.name = "mutant: accepted decisions ignored";
  limits.members = 3;
  limits.units = 0;
  limits.losses = {{0, 2}, {1, 0}};
  limits.rules.choose = ignores_accepted;
  is_found(limits);
}

CASE("mutant found: one done is enough for a unit to stand") {
  Limits limits;
  limits.name = "mutant: any done commits";
  limits.rules.choose = any_done_commits;
  is_found(limits);
}

CASE("mutant found: any half is a quorum") {
  Limits limits;
  limits.name = "mutant: any half is a quorum";
  limits.rules.is_quorum = any_half;
  is_found(limits);
}

CASE("mutant found: the store gives the tie vote to both halves") {
  Limits limits;
  limits.name = "mutant: two tie votes";
  limits.tie_by_store = limits.store_grants_all = true;
  limits.rules.is_quorum = [](const MemberSet& votes, const MemberView& view, const Tie& tie) {
    return is_quorum(votes, view, tie);
  };
  is_found(limits);
}

// A schedule at random: messages are lost, repeated and overtake each other, ranks die and are suspected. Then all is calm:
// what was sent arrives, deaths are known. Those that live on hosts of their own have to come to a decision then.
class Schedule {
 public:
  Schedule(const Limits& limits, uint64_t seed) : model_(limits), limits_(limits), random_(seed) {
    for (int place = 0; place < limits.members; ++place) {
      Effects effects;
      pages_.emplace_back();
      sites_.push_back(model_.start(place, effects));
      take(effects);
    }
  }

  std::string run(int steps) {
    std::string wrong;
    for (int i = 0; i < steps && wrong.empty(); ++i) {
      any_step();
      wrong = violation(pointers());
    }
    return wrong.empty() ? calm() : wrong;
  }
  bool decided() const {
    return std::any_of(sites_.begin(), sites_.end(), [](const Site& site) { return !site.decisions.empty(); });
  }

 private:
  std::vector<const Site*> pointers() const {
    std::vector<const Site*> out;
    for (const Site& site : sites_) out.push_back(&site);
    return out;
  }
  void take(const Effects& effects) {
    for (const auto& [place, bytes] : effects.records) pages_[static_cast<std::size_t>(place)] = bytes;
    for (const Mail& mail : effects.mail) mail_.push_back(mail);
  }
  int below(std::size_t limit) { return static_cast<int>(random_() % limit); }

  void any_step() {
    const int place = below(sites_.size());
    const int other = below(sites_.size());
    Site& site = sites_[static_cast<std::size_t>(place)];
    const int dice = below(100);
    Effects effects;
    if (dice < 60 && !mail_.empty()) {
      const auto at = mail_.begin() + below(mail_.size());
      const Mail mail = *at;
      if (below(100) < 80) mail_.erase(at);
      if (below(100) < 95 && lives(mail.to)) model_.deliver(sites_[static_cast<std::size_t>(mail.to)], mail, effects);
    } else if (!lives(place) || site.over) {
      return;
    } else if (dice < 85) {
      if (const uint64_t unit = model_.open_unit(site); unit != 0) model_.become_done(site, place, unit, effects);
    } else if (dice < 92) {
      model_.tick(site, place, effects);
    } else if (dice < 97) {
      if (other != place) lose(site, place, other, effects);
    } else if (static_cast<int>(dead_.size()) < limits_.crashes) {
      dead_.insert(place);
    }
    take(effects);
  }
  bool lives(int place) const { return !dead_.contains(place); }
  // A rank that was expelled, or knows that it was left behind, ends.
  bool answers(int place) const {
    const Site& site = sites_[static_cast<std::size_t>(place)];
    return lives(place) && !site.expelled && !site.change.standing().left_out;
  }
  // On one host only the lowest that lives answers for the dead, and nobody errs about who is dead.
  void lose(Site& site, int place, int other, Effects& effects) {
    int lowest = 0;
    while (!answers(lowest)) ++lowest;
    if (!answers(other) && limits_.pages && place == lowest)
      model_.answer_for(site, place, other, pages_[static_cast<std::size_t>(other)], effects);
    else if (!answers(other) || --limits_.suspicions >= 0)
      model_.suspect(site, place, other, effects);
  }

  std::string standings() const {
    std::string out;
    for (int place = 0; place < limits_.members; ++place) {
      const Site& site = sites_[static_cast<std::size_t>(place)];
      const auto standing = site.change.standing();
      out += "\n       rank " + std::to_string(place) + (lives(place) ? "" : " dead") + (site.over ? " over" : "") +
             (site.expelled ? " expelled" : "") + (standing.left_out ? " left out" : "") + ", view " +
             std::to_string(site.change.view().number) + " of " + ranks_text(site.change.view().places) +
             (standing.leads ? " leads with votes: " + std::to_string(standing.votes) : "");
      for (const int other : standing.waiting_for) out += " waits for " + std::to_string(other);
    }
    return out;
  }

  std::string calm() {
    for (int round = 0; round < 400; ++round) {
      for (int place = 0; place < limits_.members; ++place) {
        Site& site = sites_[static_cast<std::size_t>(place)];
        if (!lives(place) || site.over) continue;
        Effects effects;
        for (int other = 0; other < limits_.members; ++other)
          if (other != place && !answers(other)) lose(site, place, other, effects);
        if (round % 10 == 9 && site.change.next_tick_ms() != ViewConsensus::kNever && below(3) == 0)
          model_.tick(site, place, effects);
        take(effects);
      }
      const std::vector<Mail> all = std::exchange(mail_, {});
      for (const Mail& mail : all) {
        Effects effects;
        Site& site = sites_[static_cast<std::size_t>(mail.to)];
        if (!lives(mail.to)) continue;
        if (mail.view > site.change.view().number) mail_.push_back(mail);  // it comes later
        model_.deliver(site, mail, effects);
        take(effects);
      }
      if (std::string wrong = violation(pointers()); !wrong.empty()) return wrong;
    }
    if (limits_.pages) return {};  // see what is not covered: docs/design/elastic_agreement.md
    for (int place = 0; place < limits_.members; ++place) {
      const Site& site = sites_[static_cast<std::size_t>(place)];
      if (lives(place) && !site.over && site.change.standing().since_ms != ViewConsensus::kNever &&
          !site.change.standing().left_out)
        return "rank " + std::to_string(place) + " waits for ever for a decision:" + standings();
    }
    return {};
  }

  Model model_;
  Limits limits_;
  std::mt19937_64 random_;
  std::vector<Site> sites_;
  std::vector<std::vector<std::byte>> pages_;
  std::vector<Mail> mail_;
  std::set<int> dead_;
};

void schedules(Limits limits) {
  const uint64_t times = std::max<uint64_t>(setting("RINGDP_EXPLORE", 1), 1);
  const uint64_t seed = setting("RINGDP_SEED", std::random_device()());
  std::printf("     %s: RINGDP_SEED=%llu\n", limits.name, static_cast<unsigned long long>(seed));
  limits.rounds = UINT64_MAX;
  limits.resends = true;
  uint64_t decided = 0;
  const uint64_t count = std::max<uint64_t>(300 * times / kSlowness, 20);
  for (uint64_t i = 0; i < count; ++i) {
    Schedule schedule(limits, seed + i);
    const std::string wrong = schedule.run(300);
    CHECK_EQ(wrong, std::string());
    if (!wrong.empty())
      return std::printf("       RINGDP_SEED=%llu\n", static_cast<unsigned long long>(seed + i)), void();
    decided += schedule.decided() ? 1 : 0;
  }
  std::printf("     %8llu schedules, %llu with a decision\n", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(decided));
  CHECK(decided > count / 2);
}

CASE("random schedules of four and five members on one host, of which three die") {
  // Not by default: about one run in five fails, see what is not covered in docs/design/elastic_agreement.md.
  if (std::getenv("RINGDP_EXPLORE") == nullptr) return;
  for (const int members : {4, 5}) {
    Limits limits;
    limits.name = members == 4 ? "4 members of one host" : "5 members of one host";
    limits.members = members;
    limits.crashes = 3;
    limits.changes = 3;
    limits.units = 6;
    limits.suspicions = 0;
    limits.pages = true;
    schedules(limits);
  }
}

CASE(
    "random schedules of four and five members on hosts of their own, of which one dies and two are suspected "
    "wrongly") {
  for (const int members : {4, 5}) {
    Limits limits;
    limits.name = members == 4 ? "4 members" : "5 members";
    limits.members = members;
    limits.crashes = 1;
    limits.changes = 1;
    limits.units = 4;
    schedules(limits);
  }
}

}  // namespace
}  // namespace ringdp::testing
