// What the members of a view tell each other to agree on the next one, and what a vote's page holds: as values and as bytes.
// Sets of members are by index in the view's list of places. Value types, any thread.
#pragma once

#include <bitset>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ringdp {

inline constexpr std::size_t kMaxMembers = 256;   // of a view that can change
inline constexpr std::size_t kMaxOpenUnits = 16;  // on one rank
inline constexpr std::size_t kMaxOutcomes = 64;   // of units, in a decision
inline constexpr std::size_t kCauseBytes = 256;   // of the words for a change
inline constexpr std::size_t kMessageBytes = 4096;
inline constexpr std::size_t kVoteBytes = 4096;

using MemberSet = std::bitset<kMaxMembers>;

// A place is a rank's fixed number in the job. The members of a view are places in ascending order.
struct MemberView {
  uint64_t number = 1;
  std::vector<int> places;

  int size() const { return static_cast<int>(places.size()); }
  int member_of(int place) const;  // its index; -1 for a place that is not a member
  MemberSet everybody() const;
  std::vector<int> places_of(const MemberSet& members) const;

  bool operator==(const MemberView&) const = default;
};

// An attempt to change a view, by the member that leads it. The higher one wins; {0, -1} comes before all.
struct Ballot {
  uint64_t round = 0;
  int32_t member = -1;

  bool none() const { return round == 0; }
  auto operator<=>(const Ballot&) const = default;
};

// What becomes of a unit that was open when the view changed: it stands as it is, or the new view's members do it again.
struct UnitOutcome {
  uint64_t unit = 0;
  bool redo = false;

  bool operator==(const UnitOutcome&) const = default;
};

struct ViewDecision {
  uint64_t view = 0;        // the number of the view that it makes
  std::vector<int> places;  // its members
  std::vector<UnitOutcome> units;
  bool replay = false;  // an operation outside units was under way: its callers are told, on all members
  std::string cause;    // in words, the same on all members; may be empty

  MemberView view_made() const { return {view, places}; }
  bool keeps(int place) const { return view_made().member_of(place) >= 0; }
  bool operator==(const ViewDecision&) const = default;
};

// How far a member is with its units. Frozen with it: it does not change any more in this view.
struct UnitReport {
  struct Open {
    uint64_t unit = 0;
    bool done = false;
    bool operator==(const Open&) const = default;
  };

  uint64_t next = 1;       // the first unit that it has not begun
  std::vector<Open> open;  // in ascending order; what is neither open nor to come was left
  uint64_t plain_called = 0;
  uint64_t plain_finished = 0;

  bool operator==(const UnitReport&) const = default;
};

// What a member answers to a ballot that it follows.
struct MemberAnswer {
  MemberSet votes;   // its own, and those of dead members for which it answers
  MemberSet linked;  // whom it is connected to, and itself
  UnitReport units;
  Ballot accepted_in;  // the highest ballot in which one of the votes has accepted a decision, and that decision
  std::optional<ViewDecision> accepted;
  std::string cause;  // for which this member wants the change, in words

  bool operator==(const MemberAnswer&) const = default;
};

struct ViewMessage {
  enum class Type : uint8_t {
    kSuspect = 1,   // to the leader: a member is lost, please change the view
    kPrepare = 2,   // leader: follow this ballot
    kState = 3,     // follower: `state`
    kAccept = 4,    // leader: accept `decision`
    kAccepted = 5,  // follower: `votes` have accepted it
    kDecide = 6,    // `decision` is decided
    kRefused = 7    // the sender follows `promised`, which is higher
  };

  Type type = Type::kSuspect;
  uint64_t view = 0;
  Ballot ballot;
  Ballot promised;
  MemberSet votes;
  MemberAnswer state;
  std::optional<ViewDecision> decision;

  static ViewMessage decided(const ViewDecision& decision);  // by the view before
  bool asks() const;                                         // who knows the decision answers with it

  std::vector<std::byte> encode() const;  // at most kMessageBytes
  // Throws Error(kHandshake) for bytes that are not a message as encode() writes it.
  static ViewMessage decode(std::span<const std::byte> raw);
  std::string text() const;  // "state of (2, 1)": for logs
  bool operator==(const ViewMessage&) const = default;
};

// A member's vote as its page holds it: what it has promised and accepted in a view, and the decision that made this view.
struct VoteRecord {
  uint64_t view = 0;
  Ballot promised;
  Ballot accepted_in;
  std::optional<ViewDecision> accepted;
  std::optional<ViewDecision> made_by;

  std::vector<std::byte> encode() const;  // at most kVoteBytes
  // Throws Error(kHandshake), as ViewMessage::decode.
  static VoteRecord decode(std::span<const std::byte> raw);
  bool operator==(const VoteRecord&) const = default;
};

}  // namespace ringdp
