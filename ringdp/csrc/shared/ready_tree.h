// ReadyTree: a barrier over existing connections. The parent of rank r is rank (r - 1) / 4. A rank that is ready, and
// has the reports of its children, reports to its parent; rank 0 then knows that all are ready and informs its
// children, and these theirs. Each report has the largest number of its subtree, and the way down the largest of all.
// All ranks together send 2 (n - 1) messages, of which 2 log4(n) follow one another, and no rank communicates with
// more than five others. Bookkeeping only: SharedSetup sends the messages. Used by the thread of the rendezvous.
#pragma once

#include <cstdint>
#include <vector>

namespace ringdp {

class ReadyTree {
 public:
  ReadyTree(int rank, int world);

  bool is_neighbour(int peer) const;
  int parent() const { return parent_; }  // -1: this is rank 0
  static int parent_of(int rank);         // the same
  const std::vector<int>& children() const { return children_; }

  void set_ready(int64_t number);  // the first call counts
  // The report of a child: its subtree is ready, with the largest `number`. False: it was not expected. It may come
  // again, over another connection.
  bool take_report(int peer, int64_t number);
  // the parent's message that all are ready; false and repetition as above
  bool take_all_ready(int peer, int64_t number);

  bool to_report() const;  // this rank and all behind it are ready, and the parent (rank 0: itself) does not know yet
  void note_reported();
  bool reported() const { return reported_; }
  bool all_ready() const { return all_ready_; }
  int64_t largest() const { return largest_; }  // of this rank's subtree; once all are ready, of all ranks
  std::vector<int> awaited() const;             // the neighbours whose message is missing

 private:
  const int parent_;
  std::vector<int> children_;
  std::vector<int> silent_;  // children that have not reported
  bool ready_ = false;
  bool reported_ = false;
  bool all_ready_ = false;
  int64_t largest_ = 0;
};

}  // namespace ringdp
