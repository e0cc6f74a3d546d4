// ViewConsensus: how the members of one view agree on the next, and on what becomes of the units that are open: single-decree
// Paxos among the view's members, docs/design/elastic_agreement.md. It has no thread, no clock and no connection: its owner
// tells it what happens and takes what it wants written and sent. One for each member and view; the next view has its own.
//
// The member with the lowest place that is not suspected leads: it asks all members to follow its ballot (which freezes their
// units), proposes what follows from their states, and has it accepted by a quorum. Anybody may lead at any time; that costs
// time and never makes two decisions. Messages may be lost, late, repeated or out of order.
//
// Value type; used by one thread at a time. Owned by whoever drives it: the group's Agreement, or a test.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "membership/leading.h"
#include "membership/messages.h"
#include "membership/rules.h"
#include "membership/units.h"
#include "membership/votes.h"

namespace ringdp {

struct ViewConsensusOptions {
  bool tie_by_store = false;
  int64_t listen_ms = 20;      // a leader waits that long for a second loss, also when all have answered
  int64_t collect_ms = 3000;   // and that long for a member that does not answer
  int64_t resend_ms = 250;     // a leader repeats itself
  int64_t patience_ms = 3500;  // a member waits that long for another that leads, then leads itself
  const ViewRules* rules = &kViewRules;
};

class ViewConsensus {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // `place` is this rank's, a member of `view`, which has at most kMaxMembers. Throws Error(kValue) for another view.
  ViewConsensus(MemberView view, int place, ViewConsensusOptions options = {});
  // Of the view that was decided, whose member this rank is: with the units that are to be redone open, and at the same time.
  ViewConsensus next() const;

  // What happens. Events other than tick() happen at the time of the last tick.
  void tick(int64_t now_ms);
  // A member is lost to this rank; once told, for good. It may be wrong. A rank that leaves in good order suspects itself.
  void suspect(int place);
  // In words, for the decision: what this rank says when it is asked after that.
  void explain(std::string cause) { cause_ = std::move(cause); }
  // Throws Error(kHandshake) for what no member says; that changes nothing. What is about another view is passed over.
  void message(int from, const ViewMessage& message);
  // A member is certainly dead, and this process is the only one that answers for its vote: the lowest living place of its
  // host, after the deaths of all others that did. `record` are the bytes of its page, empty if nothing was written.
  // False: its page says nothing that can be used. Suspects the member in any case.
  bool answer_for(int place, std::span<const std::byte> record);
  // What the store answered to wants_tie(): to whom it has granted this view's tie vote, first or now.
  void tie_granted(const std::vector<int>& places);

  Units& units() { return units_; }
  const Units& units() const { return units_; }

  // What is to be done after each event: first `records` are written into the pages of their places, then `messages` are sent
  // to theirs.
  struct Output {
    std::vector<std::pair<int, std::vector<std::byte>>> records;
    std::vector<std::pair<int, ViewMessage>> messages;
  };
  Output take_output();

  const MemberView& view() const { return view_; }
  // Once there, it stays. A rank that it does not keep was expelled.
  const std::optional<ViewDecision>& decision() const { return decision_; }
  int64_t next_tick_ms() const;  // when to call tick() at the latest
  // The half of the votes for which the store has to be asked; none: it has not.
  std::optional<std::vector<int>> wants_tie() const;
  struct Standing {
    int64_t since_ms = kNever;  // when a change began that is not decided; kNever: there is none
    bool leads = false;
    bool left_out = false;  // a dead member's page is more than a view ahead: the others went on without this rank
    std::size_t votes = 0;  // that have answered this rank, if it leads
    std::vector<int> waiting_for;  // members: not lost, and have not answered; or the one that leads
  };
  Standing standing() const;

 private:
  void want();
  bool follows_another() const;
  void look_for_leader();
  void lead();
  void follow(int leader, const ViewMessage& message);
  void vote_late(int member);
  void advance();
  void decide(const ViewDecision& decision);
  MemberAnswer state_of(const MemberSet& votes) const;

  MemberView view_;
  int self_;  // its index, as of all members here
  ViewConsensusOptions options_;
  int64_t now_ms_ = 0;
  Units units_;
  Votes votes_;
  MemberSet suspects_;
  uint64_t highest_round_ = 0;
  std::optional<Leading> leading_;
  Tie tie_;
  int64_t attempt_at_ = kNever;  // when to lead, if nothing is decided by then
  int64_t resend_at_ = kNever;
  int64_t undecided_since_ = kNever;
  std::optional<ViewDecision> decision_;
  bool left_out_ = false;
  std::string cause_;
  Outbox outbox_;

  friend class StateBytes;
};

// What decides how a ViewConsensus goes on, as bytes: two with the same bytes behave alike. Times are relative to now.
std::vector<std::byte> state_bytes(const ViewConsensus& change);

}  // namespace ringdp
