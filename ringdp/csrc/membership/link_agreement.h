// LinkAgreement: a ViewConsensus over the connections between the ranks. The thread that has frozen this rank's part of a view
// calls `agree`, which blocks until the next view is decided; no store and no launcher takes part.
// Owned by the group whose views change; used by one thread at a time. A ViewPost is any thread's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "membership/view_consensus.h"
#include "membership/vote_pages.h"

namespace ringdp {

// How messages get to the other ranks: by the engine, over the links of its job.
class ViewPost {
 public:
  using Letters = std::vector<std::pair<int, std::vector<std::byte>>>;  // the place from which it came, and the bytes

  virtual ~ViewPost() = default;
  // In order, and without waiting; dropped where the place cannot be reached.
  virtual void send(int place, std::vector<std::byte> bytes) = 0;
  // What has come since the last call. Looks at all links first.
  virtual Letters receive() = 0;
  // Those of these places with which there is no connection any more.
  virtual std::vector<int> unreachable(const std::vector<int>& places) = 0;
};

class LinkAgreement {
 public:
  // Called now and then; throws to give up. `waiting_for`: members that are not lost and have not answered this rank, where
  // it leads; or the member that leads.
  using Look = std::function<void(const std::vector<int>& waiting_for)>;

  // A member that is not lost is waited for: it may be in a long computation.
  static ViewConsensusOptions options();

  // `pages`: of this host's ranks; null where votes
  // die with their process.
  LinkAgreement(std::unique_ptr<ViewPost> post, std::unique_ptr<VotePages> pages);

  // `change` is of this rank's present view, and its units say how far the rank is. Returns what was decided for the next
  // view, of which this rank may not be a member. Throws what `look` throws, Error(kState) where the others
  // went on without this rank and are dead, and Error(kHandshake) for bytes that no rank of this
  // job sends.
  ViewDecision agree(ViewConsensus& change, const Look& look);

 private:
  void note_losses(ViewConsensus& change);
  void take(ViewConsensus& change, int from, const std::vector<std::byte>& bytes);
  void put_out(ViewConsensus& change);

  const std::unique_ptr<ViewPost> post_;
  const std::unique_ptr<VotePages> pages_;
  ViewPost::Letters early_;              // about views that this rank is not in yet
  std::vector<ViewDecision> decisions_;  // of the views before, for members that have not heard of them
  uint64_t answering_view_ = 0;
  std::set<int> answered_;  // the dead for which this rank answers in that view, or whose pages are of no use
};

}  // namespace ringdp
