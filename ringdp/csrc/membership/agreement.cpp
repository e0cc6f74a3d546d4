#include "membership/agreement.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

#include "base/error.h"

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

bool contains(const std::vector<int>& list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
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
  const std::string prefix = std::to_string(view) + "/";
  const auto key_of = [&](int member) { return prefix + "state/" + std::to_string(member); };
  const std::string decision_key = prefix + "decision";
  store_->set(key_of(self), mine.encode());
  std::vector<int> lost = mine.lost;
  auto pause = std::chrono::duration_cast<std::chrono::microseconds>(kShortestPause);
  for (;;) {
    if (const auto decided = store_->find(decision_key)) return Decision::decode(*decided);
    for (const int member : unreachable())
      if (!contains(lost, member)) lost.push_back(member);
    std::vector<int> living, waiting_for;
    for (const int member : members)
      if (!contains(lost, member)) living.push_back(member);
    if (living.front() == self) {
      std::vector<MemberState> states;
      std::vector<int> left_out;
      for (const int member : living) {
        const auto said = member == self ? mine.encode() : store_->find(key_of(member)).value_or("");
        if (said.empty())
          waiting_for.push_back(member);
        else
          states.push_back(MemberState::decode(said));
      }
      if (waiting_for.empty()) {
        // All members of a view reach each other: of two that do not, the lower one stays.
        for (std::size_t i = 0; i < living.size(); ++i)
          for (const int member : states[i].lost)
            if (contains(living, member) && !contains(left_out, living[i]) && !contains(left_out, member))
              left_out.push_back(std::max(member, living[i]));
        std::vector<int> staying;
        std::vector<MemberState> theirs;
        for (std::size_t i = 0; i < living.size(); ++i) {
          if (contains(left_out, living[i])) continue;
          staying.push_back(living[i]);
          theirs.push_back(states[i]);
        }
        return Decision::decode(store_->set_first(decision_key, decide(staying, theirs).encode()));
      }
    } else {
      waiting_for.push_back(living.front());
    }
    look(waiting_for);
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(pause * 3 / 2, kLongestPause);
  }
}

}  // namespace ringdp
