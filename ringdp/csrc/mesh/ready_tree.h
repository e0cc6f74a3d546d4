// ReadyTree: how all ranks learn that every one of them is ready, over connections that they have anyway. The parent
// of rank r is rank (r - 1) / 4. A rank that is ready, and has heard the same from its children, reports to its
// parent; rank 0 then knows that all are, tells its children, and these theirs. On the way up the ranks agree on the
// largest of a number that each brings along, on the way down all hear it. All ranks together send 2 (n - 1) messages,
// of which 2 log4(n) follow one another, and no rank talks with more than five others. Bookkeeping only: SharedSetup
// sends the messages. Used by the thread that meets.
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
  // A child and all behind it are ready, `number` is their largest; false: the report was not expected. It may come
  // again, over another connection.
  bool take_report(int peer, int64_t number);
  bool take_all_ready(int peer, int64_t number);  // the parent knows that all are; false, and again: the same

  bool to_report() const;  // this rank and all behind it are ready, and the parent (rank 0: itself) does not know yet
  void note_reported();
  bool reported() const { return reported_; }
  bool all_ready() const { return all_ready_; }
  int64_t largest() const { return largest_; }  // of those behind this rank; once all are ready, of all
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
