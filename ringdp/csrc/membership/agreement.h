// Agreement: after the loss of a member the survivors of a view agree on the next view, and on whether the unit in
// progress counts (docs/lab/elastic.md). Each survivor publishes its state once; one decision follows from the states,
// the same for all. Implementations are owned by an ElasticGroup and used by one thread at a time, which blocks. Value
// types, any thread.
//
// UnitProgress: a member's progress in units, and its allowed next steps. A unit is done when the rank has its own
// complete results, and left when the rank knows that all members of its view have done it. A value type; its owner
// locks. Explored in tests/cpp/test_agreement.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "meet/store.h"

namespace ringdp {

struct StoreRequest;

// A member's state when it leaves a view. It starts no further operation in that view.
struct MemberState {
  uint64_t left = 0;        // units that it has left, over all views
  bool done = false;        // it has complete results of the next one
  uint64_t called = 0;      // operations outside units that it has called in this view
  bool unfinished = false;  // some of them have failed here
  std::vector<int> lost;    // members to which it has no connection
  std::string cause;        // why the first of them was lost; one line
  // For the log. Of the unit after those that it has left:
  std::string unit{};             // its name, one line; empty: this member has none in progress
  bool batches = false;           // each member has a batch in it
  std::vector<double> weights{};  // of these batches, by member in the view's order; empty: unknown to this member

  std::string encode() const;
  static MemberState decode(const std::string& text);  // throws Error(kHandshake)
};

struct Decision {
  std::vector<int> members;  // of the next view, by place, in the order of this one
  uint64_t committed = 0;    // the number of units that count, over all views; the next one is repeated
  // Operations outside units are unfinished on some members: all members get an error.
  bool replay = false;
  std::string cause;  // of the change: the shortest of the survivors' explanations
  // For the log: the units that the survivors had in progress. Empty: none had one.
  std::string counted{};  // the last unit that counts, if a survivor had not left it
  std::string again{};    // the one that is repeated
  bool batches = false;   // of `again`, as in MemberState
  std::vector<double> weights{};
  bool planned = false;  // nobody was lost: the members that are not named had said that they leave
  // The members go on over the connections of this world, with its newcomers (ElasticGroup::prepare). Empty: over
  // those that they have.
  std::string world{};

  std::string encode() const;
  static Decision decode(const std::string& text);  // throws Error(kHandshake)
};

// The decision for the survivors' states; `states[i]` is that of `members[i]`. A unit counts if all of them have done
// it, or if one has left it: no member leaves a unit before all have done it.
Decision decide(const std::vector<int>& members, const std::vector<MemberState>& states);

class Agreement {
 public:
  // The members of the view to which this rank has lost its connection.
  using Unreachable = std::function<std::vector<int>()>;
  // Called at intervals; throws to give up. `waiting_for`: connected members that have not published their states.
  using Look = std::function<void(const std::vector<int>& waiting_for)>;

  virtual ~Agreement() = default;
  // Returns the decision for the view after `view`, of which this rank may not be a member.
  virtual Decision agree(uint64_t view, const std::vector<int>& members, int self, const MemberState& mine,
                         const Unreachable& unreachable, const Look& look) = 0;
  // A change without a loss, which all members propose alike after the same unit. Returns the decision for the view
  // after `view`: another one if a member that had lost others was first.
  virtual Decision propose(uint64_t view, int self, const Decision& decision) = 0;
};

// With a store that outlives the ranks (the launcher's): the lowest connected member collects the others' states
// there, and the first decision that is written is final.
class StoreAgreement final : public Agreement {
 public:
  explicit StoreAgreement(std::unique_ptr<Store> store) : store_(std::move(store)) {}

  Decision agree(uint64_t view, const std::vector<int>& members, int self, const MemberState& mine,
                 const Unreachable& unreachable, const Look& look) override;
  Decision propose(uint64_t view, int self, const Decision& decision) override;

 private:
  std::optional<std::string> ask(const StoreRequest& request);

  std::unique_ptr<Store> store_;
};

class UnitProgress {
 public:
  // `freezes`: false is wrong, and for the tests.
  explicit UnitProgress(bool freezes = true) : freezes_(freezes) {}

  uint64_t left() const { return left_; }  // the number of units left, over all views
  uint64_t view() const { return view_; }
  bool done() const { return done_; }  // the unit after these
  bool frozen() const { return frozen_; }

  enum class Entry { kLeft, kFrozen, kEntered };
  // This rank has its results of the unit, and will enter the barrier. kLeft: a change has counted the unit meanwhile;
  // kFrozen: this rank has published its state, and completes no further unit.
  Entry enter(uint64_t unit);
  // All members of `view` have entered the barrier. False: the members have changed since, and the unit does not
  // count.
  bool leave(uint64_t unit, uint64_t view);
  // This rank's state, which is now frozen: it enters no barrier until the next view is installed.
  MemberState freeze();
  void install(uint64_t view, uint64_t committed);
  // What this rank proposes after a unit that it has left: that one counts, and no further one. Throws Error(kState)
  // where it has done a unit and not left it.
  Decision proposal(Decision decision) const;

 private:
  bool freezes_;
  uint64_t left_ = 0;
  uint64_t view_ = 1;
  bool done_ = false;
  bool frozen_ = false;
};

}  // namespace ringdp
