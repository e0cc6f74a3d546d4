// ReadyTree: how all ranks learn that every one of them is ready, over connections that they have anyway. The parent of rank r
// is rank (r - 1) / 4. A rank that is ready, and has heard the same from its children, reports to its parent; rank 0 then
// knows that all are, tells its children, and these theirs. All ranks together send 2 (n - 1) messages, of which 2 log4(n)
// follow one another, and no rank talks with more than five others. Bookkeeping only: SharedSetup sends the messages.
// Used by the thread that meets.
#pragma once

#include <vector>

namespace ringdp {

class ReadyTree {
 public:
  ReadyTree(int rank, int world);

  bool is_neighbour(int peer) const;
  int parent() const { return parent_; }  // -1: this is rank 0
  static int parent_of(int rank);         // the same
  const std::vector<int>& children() const { return children_; }

  void set_ready() { ready_ = true; }
  bool take_report(int peer);     // a child and all behind it are ready; false: the report was not expected
  bool take_all_ready(int peer);  // the parent knows that all are; false: the same

  bool to_report() const;  // this rank and all behind it are ready, and the parent (rank 0: itself) does not know yet
  void note_reported();
  bool all_ready() const { return all_ready_; }
  std::vector<int> awaited() const;  // the neighbours whose message is missing

 private:
  const int parent_;
  std::vector<int> children_;
  std::vector<int> silent_;  // children that have not reported
  bool ready_ = false;
  bool reported_ = false;
  bool all_ready_ = false;
};

}  // namespace ringdp
