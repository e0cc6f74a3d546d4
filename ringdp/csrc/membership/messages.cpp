#include "membership/messages.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/text.h"

namespace ringdp {
namespace {

constexpr std::size_t kSetBytes = kMaxMembers / 8;
constexpr uint64_t kMaxRound = 1ULL << 62;  // the next one is a number, too
constexpr std::array<std::string_view, 8> kTypeNames{"",       "suspicion", "prepare",  "state",
                                                     "accept", "accepted",  "decision", "refusal"};

class Writer {
 public:
  template <typename T>
  Writer& number(T value) {
    out_.resize(out_.size() + sizeof(T));
    put(out_.data() + out_.size() - sizeof(T), value);
    return *this;
  }
  Writer& ballot(const Ballot& it) { return number(it.round).number(it.member); }
  Writer& set(const MemberSet& members) {
    for (std::size_t byte = 0; byte < kSetBytes; ++byte) {
      uint8_t bits = 0;
      for (std::size_t bit = 0; bit < 8; ++bit) bits |= static_cast<uint8_t>(members[byte * 8 + bit] ? 1U << bit : 0U);
      number(bits);
    }
    return *this;
  }
  Writer& decision(const std::optional<ViewDecision>& it) {
    number(static_cast<uint8_t>(it ? 1 : 0));
    if (!it) return *this;
    number(it->view).number(static_cast<uint8_t>(it->replay ? 1 : 0));
    number(static_cast<uint16_t>(it->places.size()));
    for (const int place : it->places) number(static_cast<int32_t>(place));
    number(static_cast<uint8_t>(it->units.size()));
    for (const UnitOutcome& unit : it->units) number(unit.unit).number(static_cast<uint8_t>(unit.redo ? 1 : 0));
    return text(it->cause);
  }
  Writer& units(const UnitReport& it) {
    number(it.next).number(it.plain_called).number(it.plain_finished).number(static_cast<uint8_t>(it.open.size()));
    for (const auto& open : it.open) number(open.unit).number(static_cast<uint8_t>(open.done ? 1 : 0));
    return *this;
  }
  Writer& text(const std::string& it) {
    const std::string cut = clean_text(it, kCauseBytes);
    number(static_cast<uint16_t>(cut.size()));
    for (const char letter : cut) number(letter);
    return *this;
  }
  std::vector<std::byte> finish() { return std::move(out_); }

 private:
  std::vector<std::byte> out_;
};

class Reader {
 public:
  Reader(std::span<const std::byte> raw, std::size_t limit) : left_(raw) {
    if (raw.size() > limit) refuse();
  }

  [[noreturn]] static void refuse() {
    throw Error(ErrorKind::kHandshake, "received bytes that are not a message about the group's membership");
  }
  template <typename T>
  T number() {
    if (left_.size() < sizeof(T)) refuse();
    const T value = take<T>(left_.data());
    left_ = left_.subspan(sizeof(T));
    return value;
  }
  bool flag() { return below<uint8_t>(2) == 1; }
  template <typename T>
  T below(std::size_t limit) {
    const T value = number<T>();
    if (value >= limit) refuse();
    return value;
  }
  Ballot ballot() {
    Ballot it;
    it.round = number<uint64_t>();
    it.member = number<int32_t>();
    if (it.round > kMaxRound) refuse();
    if (it.none() ? it.member != -1 : it.member < 0 || it.member >= static_cast<int32_t>(kMaxMembers)) refuse();
    return it;
  }
  MemberSet set() {
    MemberSet members;
    for (std::size_t byte = 0; byte < kSetBytes; ++byte) {
      const auto bits = number<uint8_t>();
      for (std::size_t bit = 0; bit < 8; ++bit) members[byte * 8 + bit] = (bits >> bit & 1U) != 0;
    }
    return members;
  }
  std::optional<ViewDecision> decision() {
    if (!flag()) return std::nullopt;
    ViewDecision it;
    it.view = number<uint64_t>();
    it.replay = flag();
    it.places.resize(below<uint16_t>(kMaxMembers + 1));
    for (int& place : it.places) place = number<int32_t>();
    if (!ascending(it.places, [](int place) { return place; }) || (!it.places.empty() && it.places[0] < 0)) refuse();
    it.units.resize(below<uint8_t>(kMaxOutcomes + 1));
    for (UnitOutcome& unit : it.units) {
      unit.unit = number<uint64_t>();
      unit.redo = flag();
    }
    if (!ascending(it.units, [](const UnitOutcome& unit) { return unit.unit; })) refuse();
    it.cause = text();
    return it;
  }
  UnitReport units() {
    UnitReport it;
    it.next = number<uint64_t>();
    it.plain_called = number<uint64_t>();
    it.plain_finished = number<uint64_t>();
    it.open.resize(below<uint8_t>(kMaxOpenUnits + 1));
    for (auto& open : it.open) {
      open.unit = number<uint64_t>();
      open.done = flag();
    }
    if (!ascending(it.open, [](const UnitReport::Open& open) { return open.unit; })) refuse();
    if (!it.open.empty() && it.open.back().unit >= it.next) refuse();
    return it;
  }
  std::string text() {
    const auto size = below<uint16_t>(kCauseBytes + 1);
    if (left_.size() < size) refuse();
    std::string it(reinterpret_cast<const char*>(left_.data()), size);
    left_ = left_.subspan(size);
    if (it != clean_text(it, kCauseBytes)) refuse();
    return it;
  }
  void finish() const {
    if (!left_.empty()) refuse();
  }

 private:
  template <typename Items, typename Key>
  static bool ascending(const Items& items, Key key) {
    for (std::size_t i = 1; i < items.size(); ++i)
      if (!(key(items[i - 1]) < key(items[i]))) return false;
    return true;
  }

  std::span<const std::byte> left_;
};

}  // namespace

int MemberView::member_of(int place) const {
  const auto found = std::lower_bound(places.begin(), places.end(), place);
  return found == places.end() || *found != place ? -1 : static_cast<int>(found - places.begin());
}

MemberSet MemberView::everybody() const {
  MemberSet members;
  for (std::size_t member = 0; member < places.size(); ++member) members.set(member);
  return members;
}

std::vector<int> MemberView::places_of(const MemberSet& members) const {
  std::vector<int> out;
  for (std::size_t member = 0; member < places.size(); ++member)
    if (members[member]) out.push_back(places[member]);
  return out;
}

ViewMessage ViewMessage::decided(const ViewDecision& decision) {
  ViewMessage it;
  it.type = Type::kDecide;
  it.view = decision.view - 1;
  it.decision = decision;
  return it;
}

bool ViewMessage::asks() const { return type == Type::kSuspect || type == Type::kPrepare || type == Type::kAccept; }

std::vector<std::byte> ViewMessage::encode() const {
  Writer out;
  out.number(static_cast<uint8_t>(type)).number(view).ballot(ballot);
  switch (type) {
    case Type::kSuspect:
    case Type::kPrepare:
      break;
    case Type::kState:
      out.set(state.votes)
          .set(state.linked)
          .units(state.units)
          .ballot(state.accepted_in)
          .decision(state.accepted)
          .text(state.cause);
      break;
    case Type::kAccept:
    case Type::kDecide:
      out.decision(decision);
      break;
    case Type::kAccepted:
      out.set(votes);
      break;
    case Type::kRefused:
      out.ballot(promised);
      break;
  }
  return out.finish();
}

ViewMessage ViewMessage::decode(std::span<const std::byte> raw) {
  Reader in(raw, kMessageBytes);
  ViewMessage it;
  const auto type = in.below<uint8_t>(kTypeNames.size());
  if (type == 0) Reader::refuse();
  it.type = static_cast<Type>(type);
  it.view = in.number<uint64_t>();
  it.ballot = in.ballot();
  switch (it.type) {
    case Type::kSuspect:
    case Type::kPrepare:
      break;
    case Type::kState:
      it.state.votes = in.set();
      it.state.linked = in.set();
      it.state.units = in.units();
      it.state.accepted_in = in.ballot();
      it.state.accepted = in.decision();
      it.state.cause = in.text();
      if (it.state.accepted_in.none() == it.state.accepted.has_value()) Reader::refuse();
      break;
    case Type::kAccept:
    case Type::kDecide:
      it.decision = in.decision();
      if (!it.decision) Reader::refuse();
      break;
    case Type::kAccepted:
      it.votes = in.set();
      break;
    case Type::kRefused:
      it.promised = in.ballot();
      break;
  }
  in.finish();
  // A ballot belongs to what a leader says and to the answers to it.
  const bool without = it.type == Type::kSuspect || it.type == Type::kDecide;
  if (it.ballot.none() != without) Reader::refuse();
  return it;
}

std::string ViewMessage::text() const {
  std::string out(kTypeNames[static_cast<std::size_t>(type)]);
  if (!ballot.none()) out += " of (" + std::to_string(ballot.round) + ", " + std::to_string(ballot.member) + ")";
  return out;
}

std::vector<std::byte> VoteRecord::encode() const {
  Writer out;
  out.number(view).ballot(promised).ballot(accepted_in).decision(accepted).decision(made_by);
  return out.finish();
}

VoteRecord VoteRecord::decode(std::span<const std::byte> raw) {
  Reader in(raw, kVoteBytes);
  VoteRecord it;
  it.view = in.number<uint64_t>();
  it.promised = in.ballot();
  it.accepted_in = in.ballot();
  it.accepted = in.decision();
  it.made_by = in.decision();
  in.finish();
  if (it.accepted_in.none() == it.accepted.has_value() || it.promised < it.accepted_in) Reader::refuse();
  return it;
}

}  // namespace ringdp
