#include "membership/agreement.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/text.h"
#include "membership/member_turn.h"

namespace ringdp {

namespace {

template <typename T>
void write_list(std::ostringstream& out, const std::vector<T>& values) {
  out.precision(std::numeric_limits<double>::max_digits10);
  out << ' ' << values.size();
  for (const T value : values) out << ' ' << value;
}

template <typename T>
T read(std::istringstream& in) {
  T value{};
  if (!(in >> value))
    throw Error(ErrorKind::kHandshake, "a change of members: the store has a text of another release");
  return value;
}

template <typename T>
std::vector<T> read_list(std::istringstream& in) {
  constexpr std::size_t kMost = 1U << 20;
  const auto size = read<std::size_t>(in);
  if (size > kMost) throw Error(ErrorKind::kHandshake, "a change of members: a list in the store is too long");
  std::vector<T> values;
  for (std::size_t i = 0; i < size; ++i) values.push_back(read<T>(in));
  return values;
}

std::string read_line(std::istringstream& in) {
  std::string text;
  std::getline(in, text);
  return text;
}

Error without_a_store(int self, const std::string& place, std::vector<int> unreachable, const StoreLost& lost) {
  std::sort(unreachable.begin(), unreachable.end());
  ErrorContext context;
  context.rank = self;
  context.cause = lost.what();
  context.advice =
      "if the launcher still runs, the ranks that reach its store go on, and this one only has to end; if it does not, "
      "all ranks end like this: start the job again from its last checkpoint";
  const std::string me = "rank " + std::to_string(self);
  const std::string at = place.empty() ? "" : " at " + place + ", which the launcher on that host keeps";
  return {ErrorKind::kHandshake,
          me + " has lost " + (unreachable.empty() ? std::string("another rank") : ranks_text(unreachable)) +
              " and cannot reach the launcher's store" + at + ", by which the ranks agree on the survivors (" +
              lost.what() + "), so it cannot know whether the others have gone on without it: " + context.advice,
          context};
}

}  // namespace

std::string MemberState::encode() const {
  std::ostringstream out;
  out << left << ' ' << done << ' ' << called << ' ' << unfinished << ' ' << batches;
  write_list(out, lost);
  write_list(out, weights);
  out << '\n' << cause << '\n' << unit;
  return out.str();
}

MemberState MemberState::decode(const std::string& text) {
  std::istringstream in(text);
  MemberState state;
  state.left = read<uint64_t>(in);
  state.done = read<bool>(in);
  state.called = read<uint64_t>(in);
  state.unfinished = read<bool>(in);
  state.batches = read<bool>(in);
  state.lost = read_list<int>(in);
  state.weights = read_list<double>(in);
  read_line(in);  // the end of this one
  state.cause = read_line(in);
  state.unit = read_line(in);
  return state;
}

std::string Decision::encode() const {
  std::ostringstream out;
  out << committed << ' ' << replay << ' ' << batches << ' ' << planned;
  write_list(out, members);
  write_list(out, weights);
  out << '\n' << cause << '\n' << counted << '\n' << again << '\n' << world;
  return out.str();
}

Decision Decision::decode(const std::string& text) {
  std::istringstream in(text);
  Decision decision;
  decision.committed = read<uint64_t>(in);
  decision.replay = read<bool>(in);
  decision.batches = read<bool>(in);
  decision.planned = read<bool>(in);
  decision.members = read_list<int>(in);
  decision.weights = read_list<double>(in);
  read_line(in);  // the end of this one
  decision.cause = read_line(in);
  decision.counted = read_line(in);
  decision.again = read_line(in);
  decision.world = read_line(in);
  return decision;
}

Decision decide(const std::vector<int>& members, const std::vector<MemberState>& states) {
  Decision decision;
  decision.members = members;
  for (const MemberState& state : states) decision.committed = std::max(decision.committed, state.left);
  const bool all_done = std::all_of(states.begin(), states.end(), [&](const MemberState& state) {
    return state.left == decision.committed && state.done;
  });
  if (all_done) ++decision.committed;
  decision.replay = std::any_of(states.begin(), states.end(), [&](const MemberState& state) {
    return state.unfinished || state.called != states.front().called;
  });
  const auto shorter = [](const MemberState& a, const MemberState& b) { return a.cause.size() < b.cause.size(); };
  decision.cause = std::min_element(states.begin(), states.end(), shorter)->cause;
  for (const MemberState& state : states) {
    if (state.unit.empty()) continue;
    if (state.left < decision.committed) {
      decision.counted = state.unit;
      continue;
    }
    decision.again = state.unit;
    decision.batches = state.batches;
    if (!state.weights.empty()) decision.weights = state.weights;  // the same on all members that have them
  }
  return decision;
}

Decision StoreAgreement::agree(uint64_t view, const std::vector<int>& members, int self, const MemberState& mine,
                               const Unreachable& unreachable, const Look& look) {
  MemberTurn turn(view, members, self, mine);
  double pause_s = 0;
  try {
    while (!turn.decision()) {
      turn.lose(unreachable());
      turn.answer(ask(turn.request()));
      if (!turn.waits()) continue;
      look(turn.waiting_for());
      pause_s = agreement_pause_s(pause_s, members.size());
      std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
    }
  } catch (const StoreLost& error) {
    throw without_a_store(self, store_->place(), unreachable(), error);
  }
  return *turn.decision();
}

Decision StoreAgreement::propose(uint64_t view, int self, const Decision& decision) {
  const StoreRequest request = decision_request(view, decision);
  try {
    return Decision::decode(ask(request).value_or(request.value));
  } catch (const StoreLost& error) {
    throw without_a_store(self, store_->place(), {}, error);
  }
}

std::optional<std::string> StoreAgreement::ask(const StoreRequest& request) {
  if (request.kind == StoreRequest::Kind::kFind) return store_->find(request.key);
  if (request.kind == StoreRequest::Kind::kSetFirst) return store_->set_first(request.key, request.value);
  store_->set(request.key, request.value);
  return request.value;
}

UnitProgress::Entry UnitProgress::enter(uint64_t unit) {
  if (left_ >= unit) return Entry::kLeft;
  if (frozen_) return Entry::kFrozen;
  done_ = true;
  return Entry::kEntered;
}

bool UnitProgress::leave(uint64_t unit, uint64_t view) {
  if (left_ >= unit) return true;  // a change has counted it
  if (view_ != view) return false;
  left_ = unit;
  done_ = false;
  return true;
}

Decision UnitProgress::proposal(Decision decision) const {
  if (done_) throw Error(ErrorKind::kState, "a change of members was proposed within a unit");
  decision.committed = left_;
  return decision;
}

MemberState UnitProgress::freeze() {
  frozen_ = freezes_;
  MemberState state;
  state.left = left_;
  state.done = done_;
  return state;
}

void UnitProgress::install(uint64_t view, uint64_t committed) {
  view_ = view;
  left_ = committed;
  done_ = frozen_ = false;
}

}  // namespace ringdp
