#include "membership/agreement.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "membership/member_turn.h"

namespace ringdp {
namespace {

constexpr auto kShortestPause = std::chrono::microseconds(500);
constexpr auto kLongestPause = std::chrono::milliseconds(10);

void write_list(std::ostringstream& out, const std::vector<int>& values) {
  out << ' ' << values.size();
  for (const int value : values) out << ' ' << value;
}

template <typename T>
T read(std::istringstream& in) {
  T value{};
  if (!(in >> value))
    throw Error(ErrorKind::kHandshake, "a change of members: the store has a text of another release");
  return value;
}

std::vector<int> read_list(std::istringstream& in) {
  constexpr std::size_t kMost = 1U << 20;
  const auto size = read<std::size_t>(in);
  if (size > kMost) throw Error(ErrorKind::kHandshake, "a change of members: a list in the store is too long");
  std::vector<int> values;
  for (std::size_t i = 0; i < size; ++i) values.push_back(read<int>(in));
  return values;
}

std::string read_text(std::istringstream& in) {
  std::string end, text;
  std::getline(in, end);  // of the line before
  std::getline(in, text);
  return text;
}

}  // namespace

std::string MemberState::encode() const {
  std::ostringstream out;
  out << left << ' ' << done << ' ' << called << ' ' << unfinished;
  write_list(out, lost);
  out << '\n' << cause;
  return out.str();
}

MemberState MemberState::decode(const std::string& text) {
  std::istringstream in(text);
  MemberState state;
  state.left = read<uint64_t>(in);
  state.done = read<bool>(in);
  state.called = read<uint64_t>(in);
  state.unfinished = read<bool>(in);
  state.lost = read_list(in);
  state.cause = read_text(in);
  return state;
}

std::string Decision::encode() const {
  std::ostringstream out;
  out << committed << ' ' << replay;
  write_list(out, members);
  out << '\n' << cause;
  return out.str();
}

Decision Decision::decode(const std::string& text) {
  std::istringstream in(text);
  Decision decision;
  decision.committed = read<uint64_t>(in);
  decision.replay = read<bool>(in);
  decision.members = read_list(in);
  decision.cause = read_text(in);
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
  return decision;
}

Decision StoreAgreement::agree(uint64_t view, const std::vector<int>& members, int self, const MemberState& mine,
                               const Unreachable& unreachable, const Look& look) {
  MemberTurn turn(view, members, self, mine);
  auto pause = std::chrono::duration_cast<std::chrono::microseconds>(kShortestPause);
  while (!turn.decision()) {
    turn.lose(unreachable());
    turn.answer(ask(turn.request()));
    if (!turn.waits()) continue;
    look(turn.waiting_for());
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(pause * 3 / 2, kLongestPause);
  }
  return *turn.decision();
}

std::optional<std::string> StoreAgreement::ask(const StoreRequest& request) {
  try {
    if (request.kind == StoreRequest::Kind::kFind) return store_->find(request.key);
    if (request.kind == StoreRequest::Kind::kSetFirst) return store_->set_first(request.key, request.value);
    store_->set(request.key, request.value);
    return request.value;
  } catch (const StoreLost& error) {
    ErrorContext context;
    context.cause = error.what();
    context.advice = "start the job again, from its last checkpoint";
    throw Error(ErrorKind::kHandshake,
                std::string("a member is lost, and the others cannot agree to go on without it, because the launcher's "
                            "store, or the network to it, is lost, too: ") +
                    error.what() + "; " + context.advice,
                context);
  }
}

}  // namespace ringdp
