// Agreement: how the members of a view that lost a member agree on the next view, and on what becomes of the unit that
// was under way (docs/lab/elastic.md). Each survivor says once where it stands; one decision is made of that, the same
// for all. Implementations are owned by an ElasticGroup and used by one thread at a time, which blocks. Value types,
// any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mesh/store.h"

namespace ringdp {

struct StoreRequest;

// Where a member stands when it leaves a view. It starts nothing more in that view.
struct MemberState {
  uint64_t left = 0;        // units that it has left, over all views
  bool done = false;        // it has complete results of the next one
  uint64_t called = 0;      // operations outside units that it has called in this view
  bool unfinished = false;  // some of them have failed here
  std::vector<int> lost;    // members that it cannot reach
  std::string cause;        // why the first of them was lost, one line
  // For the log. Of the unit after those that it has left:
  std::string unit{};             // what it is, one line; empty: this member has none under way
  bool batches = false;           // each member brings a batch to it
  std::vector<double> weights{};  // of these, by member in the view's order; empty: not known here

  std::string encode() const;
  static MemberState decode(const std::string& text);  // throws Error(kHandshake)
};

struct Decision {
  std::vector<int> members;  // of the next view, by place, in the order of this one
  uint64_t committed = 0;    // so many units count, over all views; the next one is made again
  // Operations outside units are unfinished on some members: all of them get an error.
  bool replay = false;
  std::string cause;  // of the change, in the words of the survivor that says it in the fewest
  // For the log, of what the survivors had under way. Empty: none of them had any.
  std::string counted{};  // the last of the units that count, where not all had left it
  std::string again{};    // the one that is made again
  bool batches = false;   // of `again`, as in MemberState
  std::vector<double> weights{};

  std::string encode() const;
  static Decision decode(const std::string& text);  // throws Error(kHandshake)
};

// What follows of the survivors' states. `members[i]` says `states[i]`. A unit counts if all of them have done it, or
// if one has left it: nobody leaves a unit that a member has not done.
Decision decide(const std::vector<int>& members, const std::vector<MemberState>& states);

class Agreement {
 public:
  // The members of the view with which this rank has no connection any more.
  using Unreachable = std::function<std::vector<int>()>;
  // Called now and then; throws to give up. `waiting_for`: members that live and have not said where they stand.
  using Look = std::function<void(const std::vector<int>& waiting_for)>;

  virtual ~Agreement() = default;
  // Returns what was decided for the view after `view`, in which this rank may not be a member any more.
  virtual Decision agree(uint64_t view, const std::vector<int>& members, int self, const MemberState& mine,
                         const Unreachable& unreachable, const Look& look) = 0;
};

// By a store that outlives the ranks (the launcher's): the lowest member that can be reached collects what the others
// say there, and the first decision that is written counts.
class StoreAgreement final : public Agreement {
 public:
  explicit StoreAgreement(std::unique_ptr<Store> store) : store_(std::move(store)) {}

  Decision agree(uint64_t view, const std::vector<int>& members, int self, const MemberState& mine,
                 const Unreachable& unreachable, const Look& look) override;

 private:
  std::optional<std::string> ask(const StoreRequest& request);

  std::unique_ptr<Store> store_;
};

}  // namespace ringdp
