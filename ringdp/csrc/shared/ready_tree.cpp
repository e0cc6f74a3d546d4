#include "shared/ready_tree.h"

#include <algorithm>

namespace ringdp {
namespace {

constexpr int kChildren = 4;

}  // namespace

int ReadyTree::parent_of(int rank) { return rank == 0 ? -1 : (rank - 1) / kChildren; }

ReadyTree::ReadyTree(int rank, int world) : parent_(parent_of(rank)) {
  for (int child = kChildren * rank + 1; child <= kChildren * (rank + 1) && child < world; ++child)
    children_.push_back(child);
  silent_ = children_;
}

bool ReadyTree::is_neighbour(int peer) const {
  return peer == parent_ || std::find(children_.begin(), children_.end(), peer) != children_.end();
}

void ReadyTree::set_ready(int64_t number) {
  if (ready_) return;
  ready_ = true;
  largest_ = std::max(largest_, number);
}

bool ReadyTree::take_report(int peer, int64_t number) {
  if (peer == parent_ || !is_neighbour(peer)) return false;
  if (std::erase(silent_, peer) > 0) largest_ = std::max(largest_, number);
  return true;
}

bool ReadyTree::take_all_ready(int peer, int64_t number) {
  if (peer != parent_ || !reported_) return false;
  if (!all_ready_) largest_ = number;
  all_ready_ = true;
  return true;
}

bool ReadyTree::to_report() const { return ready_ && silent_.empty() && !reported_; }

void ReadyTree::note_reported() {
  reported_ = true;
  all_ready_ = parent_ < 0;
}

std::vector<int> ReadyTree::awaited() const {
  if (!silent_.empty() || all_ready_ || parent_ < 0) return silent_;
  return {parent_};
}

}  // namespace ringdp
