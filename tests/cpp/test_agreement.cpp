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

}  // namespace
}  // namespace ringdp::testing
