// How members agree after a loss: every order of what can happen to them, and wrong rules, which have to be found.
// Prints how many states it saw. RINGDP_EXPLORE=N explores N times as many.
#include <cstdio>
#include <cstdlib>

#include "agreement_explorer.h"
#include "testing.h"

namespace ringdp::testing {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kMostStates = 4'000;
#else
constexpr std::size_t kMostStates = 100'000;
#endif

std::size_t most_states() {
  const char* times = std::getenv("RINGDP_EXPLORE");
  return kMostStates * (times == nullptr ? 1 : std::strtoul(times, nullptr, 10));
}

Explorer::Result explored(const char* name, Limits limits) {
  if (limits.most_states == Limits{}.most_states) limits.most_states = most_states();
  const auto result = Explorer(limits).run();
  std::printf("%-60s %9zu states%s; a unit counts in %zu, is redone in %zu\n", name, result.states,
              result.to_the_end ? ", all" : "", result.counted, result.redone);
  if (!limits.asks.empty()) std::printf("%60s %9zu states after a change without a loss\n", "", result.changed);
  if (result.violation.empty()) return result;
  std::printf("  found after %zu steps: %s\n", result.steps.size(), result.violation.c_str());
  for (const auto& step : result.steps) std::printf("    %s\n", step.c_str());
  return result;
}

void check(const char* name, const Limits& limits) { CHECK_EQ(explored(name, limits).violation, std::string()); }

// A wrong rule, and what it leads to.
void check_found(const char* name, Limits limits, const std::string& wanted) {
  limits.most_states = 400'000;
  CHECK_EQ(explored(name, limits).violation, wanted);
}

Decision one_done_is_enough(const std::vector<int>& members, const std::vector<MemberState>& states) {
  Decision decision = decide(members, states);
  for (const MemberState& state : states)
    if (state.done) decision.committed = std::max(decision.committed, state.left + 1);
  return decision;
}

Decision nothing_counts(const std::vector<int>& members, const std::vector<MemberState>& states) {
  Decision decision = decide(members, states);
  decision.committed = states.front().left;
  for (const MemberState& state : states) decision.committed = std::min(decision.committed, state.left);
  return decision;
}

CASE("two members, one dies") { check("2 members, 1 death, 2 units", {.members = 2, .deaths = 1, .units = 2}); }

CASE("two members that believe each other lost, rightly or wrongly") {
  check("2 members, 1 death, 2 suspicions, 2 units", {.members = 2, .deaths = 1, .suspicions = 2, .units = 2});
}

CASE("three members, one dies") { check("3 members, 1 death", {.members = 3, .deaths = 1}); }

CASE("three members, two die") { check("3 members, 2 deaths", {.members = 3, .deaths = 2}); }

CASE("three members, one dies and one is believed lost") {
  check("3 members, 1 death, 1 suspicion", {.members = 3, .deaths = 1, .suspicions = 1});
}

CASE("three members, one is believed lost by two") {
  check("3 members, 2 suspicions, 2 units", {.members = 3, .deaths = 0, .suspicions = 2, .units = 2});
}

CASE("four members, one dies") { check("4 members, 1 death", {.members = 4, .deaths = 1, .views = 2}); }

// ---- Changes without a loss.

enum class Share { kAll, kHalf };  // of the states that are explored by default

void check_asks(const char* name, Limits limits, Share share = Share::kAll) {
  if (share == Share::kHalf) limits.most_states = most_states() / 2;
  const auto result = explored(name, limits);
  CHECK_EQ(result.violation, std::string());
  if (result.to_the_end) CHECK(result.changed > 0);
}

CASE("a newcomer joins two members, and one of the three dies") {
  check_asks("2 members and 1 newcomer, 1 death, 2 units",
             {.members = 2, .newcomers = 1, .deaths = 1, .units = 2, .asks = {Ask::kJoin}});
}

CASE("a newcomer joins two members, and two of the three die") {
  check_asks("2 members and 1 newcomer, 2 deaths, 2 units",
             {.members = 2, .newcomers = 1, .deaths = 2, .units = 2, .asks = {Ask::kJoin}, .views = 4}, Share::kHalf);
}

CASE("a newcomer joins two members, and one is believed lost") {
  check_asks("2 members and 1 newcomer, 1 suspicion, 2 units",
             {.members = 2, .newcomers = 1, .deaths = 0, .suspicions = 1, .units = 2, .asks = {Ask::kJoin}});
}

CASE("a newcomer joins two members, one of the three dies and one is believed lost") {
  check_asks("2 members and 1 newcomer, 1 death, 1 suspicion",
             {.members = 2, .newcomers = 1, .deaths = 1, .suspicions = 1, .asks = {Ask::kJoin}}, Share::kHalf);
}

CASE("a newcomer joins three members, and one of the four dies") {
  check_asks("3 members and 1 newcomer, 1 death", {.members = 3, .newcomers = 1, .deaths = 1, .asks = {Ask::kJoin}},
             Share::kHalf);
}

CASE("two members ask for newcomers twice, and one rank dies") {
  check_asks("2 members, 2 newcomers one after another, 1 death",
             {.members = 2, .newcomers = 2, .deaths = 1, .units = 2, .asks = {Ask::kJoin, Ask::kJoin}, .views = 4},
             Share::kHalf);
}

CASE("one member leaves three, and one rank dies") {
  check_asks("3 members, the highest leaves, 1 death",
             {.members = 3, .deaths = 1, .units = 1, .asks = {Ask::kHighestLeaves}});
  check_asks("3 members, the lowest leaves, 1 death",
             {.members = 3, .deaths = 1, .units = 1, .asks = {Ask::kLowestLeaves}});
}

CASE("one member leaves, and one is believed lost") {
  check_asks("3 members, the lowest leaves, 1 suspicion",
             {.members = 3, .deaths = 0, .suspicions = 1, .units = 1, .asks = {Ask::kLowestLeaves}});
}

CASE("the lowest member leaves, a newcomer comes, and one rank dies") {
  check_asks(
      "2 members, the lowest leaves, then 1 newcomer, 1 death",
      {.members = 2, .newcomers = 1, .deaths = 1, .units = 2, .asks = {Ask::kLowestLeaves, Ask::kJoin}, .views = 4});
  check_asks(
      "2 members, 1 newcomer, then the lowest leaves, 1 death",
      {.members = 2, .newcomers = 1, .deaths = 1, .units = 2, .asks = {Ask::kJoin, Ask::kLowestLeaves}, .views = 4});
}

CASE("wrong: who has said where it stands goes on") {
  check_found("mutant: no freeze", {.members = 3, .deaths = 1, .freezes = false},
              "a unit is redone that a rank has left");
}

CASE("wrong: a rank leaves a unit that others have not done") {
  check_found("mutant: leaves when it is done itself", {.members = 2, .deaths = 1, .waits_for_all_done = false},
              "a unit is redone that a rank has left");
}

CASE("wrong: one member that is done is enough for a unit to count") {
  check_found("mutant: one done is enough", {.members = 3, .deaths = 1, .rules = {.decide = one_done_is_enough}},
              "a unit is committed that a member has not done");
}

CASE("wrong: what was under way is always made again") {
  check_found("mutant: nothing counts", {.members = 2, .deaths = 1, .rules = {.decide = nothing_counts}},
              "a unit is redone that a rank has left");
}

CASE("wrong: the leader does not wait until all have said where they stand") {
  check_found("mutant: the leader does not wait", {.members = 3, .deaths = 1, .rules = {.waits = false}},
              "a unit is committed that a member has not done");
}

CASE("wrong: the last decision counts, not the first") {
  check_found("mutant: no compare-and-set",
              {.members = 2, .deaths = 0, .suspicions = 1, .rules = {.first_counts = false}},
              "a view is decided in two ways");
}

Decision with_all_that_is_done(const UnitProgress& progress, Decision decision) {
  decision.committed = progress.left() + (progress.done() ? 1 : 0);
  return decision;
}

Decision without_the_question(const UnitProgress& progress, Decision decision) {
  decision.committed = progress.left() - 1;
  return decision;
}

// It is not wrong: the first decision counts, and whoever decides with that state counts the question.
CASE("proposers may say where they stand as well") {
  check_asks("2 members and 1 newcomer, proposers publish states, 1 death",
             {.members = 2, .newcomers = 1, .deaths = 1, .units = 2, .asks = {Ask::kJoin}, .proposers_publish = true},
             Share::kHalf);
  check_asks("3 members, the lowest leaves, proposers publish, 1 death",
             {.members = 3, .deaths = 1, .units = 1, .asks = {Ask::kLowestLeaves}, .proposers_publish = true},
             Share::kHalf);
}

CASE("wrong: the last proposal counts") {
  check_found("mutant: a proposal without compare-and-set",
              {.members = 2,
               .newcomers = 1,
               .deaths = 0,
               .suspicions = 1,
               .units = 2,
               .asks = {Ask::kJoin},
               .proposal_rules = {.first_counts = false}},
              "a view is decided in two ways");
}

CASE("wrong: a member proposes before it has left the question") {
  check_found("mutant: proposes a newcomer when it is done itself",
              {.members = 2,
               .newcomers = 1,
               .deaths = 1,
               .units = 2,
               .asks = {Ask::kJoin},
               .proposal = with_all_that_is_done,
               .proposes_after_leaving = false},
              "the members change after a question that one has not done");
  check_found("mutant: proposes to go on without one when it is done",
              {.members = 2,
               .deaths = 1,
               .units = 2,
               .asks = {Ask::kHighestLeaves},
               .proposal = with_all_that_is_done,
               .proposes_after_leaving = false},
              "the members change after a question that one has not done");
}

CASE("wrong: a proposal does not count the question") {
  check_found(
      "mutant: the question does not count",
      {.members = 2, .newcomers = 1, .deaths = 1, .units = 2, .asks = {Ask::kJoin}, .proposal = without_the_question},
      "a unit is redone that a rank has left");
}

CASE("wrong: the lowest waits for the state of a member that has proposed") {
  check_found("mutant: no look for a decision while states are missing",
              {.members = 3, .deaths = 0, .asks = {Ask::kHighestLeaves}, .rules = {.looks = false}},
              "a rank that a decision names never installs it");
}

CASE("wrong: a newcomer is told of a world before it is decided") {
  check_found(
      "mutant: newcomers are told of proposals",
      {.members = 2, .newcomers = 1, .deaths = 1, .units = 2, .asks = {Ask::kJoin}, .told_after_decision = false},
      "a newcomer enters a view that was not decided");
}

CASE("wrong: a member that finds a decision does not tell the newcomers") {
  check_found("mutant: only proposers tell newcomers",
              {.members = 2, .newcomers = 1, .deaths = 1, .asks = {Ask::kJoin}, .all_tell_newcomers = false},
              "a rank that a decision names never installs it");
}

CASE("wrong: a newcomer gives up a world in which the members may still go on") {
  check_found("mutant: a newcomer gives its world up",
              {.members = 2, .newcomers = 1, .deaths = 0, .asks = {Ask::kJoin}, .newcomers_keep_worlds = false},
              "a rank that a decision names never installs it");
}

}  // namespace
}  // namespace ringdp::testing
