// ElasticGroup: a group that outlives its members. Its members at a time are a view, a GroupHandle of its own over the
// same connections: the view whose member is lost fails as any group does, which here means that it is frozen, and
// `change` agrees with the survivors on the next one. Ranks are numbered anew, in the same order.
//
// A unit is what counts as a whole: a training step, or an operation of RingDP's own. A rank leaves a unit only when
// all members have done it (`commit`). So after a loss either all survivors have done the unit, and it counts, or no
// rank has left it, and the survivors make it again. What is called outside units cannot be made again: where it is
// unfinished on a survivor, all of them get an Error(kMembership). Owned by a process group. Any thread; the order of
// units must be the same on all ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/group.h"
#include "membership/agreement.h"
#include "membership/unit_progress.h"

namespace ringdp {

// Of the thread: the operations that it calls belong to a unit.
class UnitScope {
 public:
  UnitScope() { ++depth(); }
  ~UnitScope() { --depth(); }
  UnitScope(const UnitScope&) = delete;
  UnitScope& operator=(const UnitScope&) = delete;

  static bool active() { return depth() > 0; }

 private:
  static int& depth();
};

// A unit, for the log.
struct UnitWords {
  std::string what;            // "step 917"
  bool batches = false;        // each rank brings a batch to it
  std::string also_lost = "";  // what goes with members that are lost from now on; empty: as before
};

// What has changed, for the log and for errors. The same on all ranks, but for `counted` and `noticed_at`.
struct ViewChange {
  uint64_t view = 0;  // the new one
  int before = 0;     // members of the old one
  Decision decision;
  std::vector<int> lost;                // by place
  std::vector<std::string> lost_names;  // "rank 3 (host n2, pid 4711)"
  std::optional<double> lost_weight;    // of their batches in what is made again
  bool counted = false;                 // a unit that this rank had under way counts, with what the lost ranks gave
  std::string also_lost;                // in words
  Clock::time_point noticed_at{};       // by this rank

  // What was lost and who goes on. `log_line` adds what became of the units that were under way, and how long it all
  // took, until now. `made`: what is made again has been made; false: it has been stopped.
  std::string text() const;
  std::string log_line(bool made) const;

 private:
  std::string part() const;
  std::string batch() const;
};

class ElasticGroup : public std::enable_shared_from_this<ElasticGroup> {
 public:
  using Told = std::function<void(const ViewChange&)>;  // by the thread that calls; may block

  static std::shared_ptr<ElasticGroup> make(std::shared_ptr<Runtime> runtime, std::string name,
                                            const std::vector<int>& members, int64_t timeout_ms,
                                            const AlgorithmTables& tables, std::unique_ptr<Agreement> agreement);

  std::shared_ptr<GroupHandle> group() const;  // the present view
  void on_change(Told told);
  // Called with each new view, before any operation of it; returns when it is not being called.
  void on_install(std::function<void(const std::shared_ptr<GroupHandle>&)> installed);
  // Beside the view's own options, of this view and all later ones.
  void set_timeout_ms(int64_t timeout_ms);
  void close(const std::string& how);

  int rank() const { return rank_; }  // in the present view
  int size() const { return size_; }
  uint64_t view() const { return view_; }
  // The unit that is made first in this view is made again by some ranks: its operations are issued at its end.
  bool first_unit() const { return view_ > 1 && left_ == base_; }

  // The next unit. Throws the error of a change that this rank has not been told of yet.
  uint64_t begin_unit(UnitWords words);
  // What the ranks' batches in the unit under way weigh, by rank in the present view. For the log.
  void know_weights(std::vector<double> weights);
  // All members have done it when this returns. Throws Error(kPeerLost) where the view is frozen, and what `change` is
  // for.
  void commit(uint64_t unit);
  enum class Outcome { kCounts, kAgain };
  // `view` has lost a member: agrees on the next one, unless that is done. `unit`: what is under way, 0 for nothing.
  // Throws Error(kMembership) where operations outside units are unfinished, Error(kExpelled) where this rank is left
  // out. `calling`: an operation outside units is about to be called.
  Outcome change(uint64_t unit, uint64_t view, bool calling = false);

  // Outside units. Before an operation: the present view. Where that has lost a member it is changed, and all get
  // Error(kMembership): what is about to be called was made for the old members (lists of one tensor for each, a root).
  std::shared_ptr<GroupHandle> group_for_call();
  // `in_order`: all members call it.
  void called(const std::vector<std::shared_ptr<Work>>& operations, bool in_order);
  // An operation that belongs to no unit has thrown `error`: throws Error(kMembership) if a lost member is the reason.
  void call_failed(uint64_t group, const Error& error);

 private:
  ElasticGroup(std::shared_ptr<Runtime> runtime, std::string name, int64_t timeout_ms, const AlgorithmTables& tables,
               std::unique_ptr<Agreement> agreement);
  std::shared_ptr<GroupHandle> make_view(uint64_t view, const std::vector<int>& members);
  MemberState freeze(const std::shared_ptr<GroupHandle>& group, uint64_t unit, bool calling);
  void install(ViewChange change);
  void look(const std::vector<int>& waiting_for, Deadline deadline, Clock::time_point& next_notice) const;
  Error changed_error() const;
  void throw_if_untold();
  void write_log_line(bool made);  // of the last change, once: when its unit has been made, or is stopped

  const std::shared_ptr<Runtime> runtime_;  // shared with the views
  const std::string name_;
  const AlgorithmTables tables_;
  const std::unique_ptr<Agreement> agreement_;  // used under change_mutex_
  std::mutex change_mutex_;                     // one change at a time; locked before mutex_
  mutable std::mutex mutex_;                    // of what follows
  std::shared_ptr<GroupHandle> group_;
  Told told_;
  std::function<void(const std::shared_ptr<GroupHandle>&)> installed_;  // under change_mutex_
  int64_t timeout_ms_;
  UnitProgress progress_;
  bool untold_ = false;  // of last_, by an exception
  uint64_t called_ = 0;
  std::vector<std::shared_ptr<Work>> calls_;  // outside units, that may not have ended
  ViewChange last_;
  bool unlogged_ = false;  // last_
  UnitWords unit_;
  std::vector<double> weights_;    // see know_weights; empty: not known
  std::atomic<uint64_t> left_{0};  // as in progress_
  std::atomic<uint64_t> base_{0};  // left_ when the view began
  std::atomic<uint64_t> view_{1};
  std::atomic<int> rank_{0};
  std::atomic<int> size_{0};
};

// Whether it is what a view is left for: a member was lost.
inline bool is_loss(const Error& error) { return error.kind() == ErrorKind::kPeerLost; }
bool is_loss(const std::exception_ptr& failure);  // null: no

}  // namespace ringdp
