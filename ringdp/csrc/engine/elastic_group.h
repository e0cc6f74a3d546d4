// ElasticGroup: a group that outlives its members. Its present members form a view, a GroupHandle of its own over the
// same connections. When a member is lost, the view fails as any group does; here that freezes it, and `change` agrees
// with the survivors on the next view. Ranks are renumbered in the same order.
//
// A unit counts or is repeated as a whole: a training step, or an operation of RingDP's own. A rank leaves a unit only
// when all members have done it (`commit`). So after a loss either all survivors have done the unit, and it counts, or
// no rank has left it, and the survivors repeat it. Operations outside units cannot be repeated: if one is unfinished
// on a survivor, all survivors get an Error(kMembership). Owned by a process group. Any thread; the order of units
// must be the same on all ranks.
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

namespace ringdp {

// While it exists, the operations that this thread calls belong to a unit.
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
struct UnitDescription {
  std::string what;            // "step 917"
  bool batches = false;        // each rank has a batch in it
  std::string also_lost = "";  // text: what is lost with members from now on; empty: unchanged
};

// Connections of the members of a view and of newcomers, over which they go on once all of them have it.
struct NextWorld {
  std::string name;  // the same on all of them, never used before
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<Agreement> agreement;
  std::vector<int> places;  // by rank in the runtime: the members of the view in their order, then newcomers
};

// A change of members, for the log and for errors. The same on all ranks, except `counted` and `noticed_at`.
struct ViewChange {
  uint64_t view = 0;  // the new one
  int before = 0;     // members of the old one
  Decision decision;
  std::vector<int> places;              // of the new members
  std::vector<int> lost;                // by rank in the runtime
  std::vector<std::string> lost_names;  // "rank 3 (host n2, pid 4711)"
  std::optional<double> lost_weight;    // of their batches in the repeated unit
  bool counted = false;                 // a unit that this rank had in progress counts, with the lost ranks' parts
  std::string also_lost;                // text
  Clock::time_point noticed_at{};       // by this rank

  // The lost and the surviving members. `log_line` adds the outcome of the units in progress, and the time until now.
  // `made`: the repeated unit is done; false: it was stopped.
  std::string text() const;
  std::string log_line(bool made) const;

 private:
  std::string part() const;
  std::string batch() const;
};

class ElasticGroup : public std::enable_shared_from_this<ElasticGroup> {
 public:
  using OnChange = std::function<void(const ViewChange&)>;  // called on the thread that makes it; may block

  static std::shared_ptr<ElasticGroup> make(std::shared_ptr<Runtime> runtime, std::string name,
                                            const std::vector<int>& members, int64_t timeout_ms,
                                            const AlgorithmTables& tables, std::unique_ptr<Agreement> agreement);

  std::shared_ptr<GroupHandle> group() const;  // the present view
  void on_change(OnChange listener);
  // Calls `installed` with each new view, before any operation in it. Returns when no call of the old one is
  // running.
  void on_install(std::function<void(const std::shared_ptr<GroupHandle>&)> installed);
  // Added to the options of this view and all later ones.
  void set_timeout_ms(int64_t timeout_ms);
  void close(const std::string& how);

  int rank() const { return rank_; }  // in the present view
  int size() const { return size_; }
  uint64_t view() const { return view_; }
  uint64_t left() const { return left_; }  // units that this rank has left, over all views
  // By rank in the present view: the number that a member has for good, which is its rank in the first view of the
  // job, or the next number that was free when it came.
  std::vector<int> places() const;
  // Of a group of some ranks: as those of the whole job.
  void set_places(std::vector<int> of_runtime);
  std::vector<int> places_of_runtime() const;  // by rank in the runtime
  // Some ranks repeat the first unit of this view: its operations are issued at its end.
  bool first_unit() const { return view_ > 1 && left_ == base_; }

  // Runs `body` as a unit on all members, which call it in the same order: it counts when it has returned on all. After
  // the loss of a member the others run it again (`again`), unless it had returned on all of them. `describe` is called
  // each time. Throws the exceptions of `body` that are no loss, and those of `change`.
  void run_unit(const std::function<UnitDescription()>& describe, const std::function<void(bool again)>& body);
  // The parts of run_unit. Begins the next unit. Throws the error of a change that was not reported to this rank yet.
  uint64_t begin_unit(UnitDescription unit);
  // The weights of the ranks' batches in the unit in progress, by rank in the present view. For the log.
  void set_weights(std::vector<double> weights);
  // Returns when all members have done the unit. Throws Error(kPeerLost) if the view is frozen, or a loss, for which
  // to call `change`.
  void commit(uint64_t unit);
  enum class Outcome { kCounts, kAgain };
  // `view` has lost a member: agrees on the next view, unless that is done. `unit`: the one in progress, or 0. Throws
  // Error(kMembership) if operations outside units are unfinished, Error(kExpelled) if this rank is not a member any
  // more. `calling`: true when the caller will run an operation that belongs to no unit.
  Outcome change(uint64_t unit, uint64_t view, bool calling = false);

  // Changes without a loss. All members call them after the same unit, which all of them have left or are about to.
  // From now on `go_on_in` may install this world; replaces one that was prepared before.
  void prepare(NextWorld world);
  // The members of `view` go on over the prepared world of this name. False: a member was lost meanwhile, and they go
  // on without it where they were.
  bool go_on_in(const std::string& world, uint64_t view);
  // The members of `view` go on without these of its ranks, which are about to leave. Returns as go_on_in.
  bool go_on_without(const std::vector<int>& ranks, uint64_t view, const std::string& cause);
  // That member of the present view is lost from now on, if it is one.
  void lose(int place, const std::string& cause);
  // On a newcomer, whose group has itself alone: it becomes a member of the view that go_on_in has made.
  void enter(uint64_t view, uint64_t left);

  // Outside units. Before an operation: the present view. If that has lost a member it is changed, and all members get
  // Error(kMembership), since the arguments of the operation were made for the old members (lists of one tensor for
  // each, a root).
  std::shared_ptr<GroupHandle> group_for_call();
  // `in_order`: all members call it.
  void called(const std::vector<std::shared_ptr<Work>>& operations, bool in_order);
  bool has_calls_in_flight() const;
  // An operation that belongs to no unit has thrown `error`: throws Error(kMembership) if the reason is a lost member.
  void call_failed(uint64_t group, const Error& error);

 private:
  ElasticGroup(std::shared_ptr<Runtime> runtime, std::string name, int64_t timeout_ms, const AlgorithmTables& tables,
               std::unique_ptr<Agreement> agreement);
  std::shared_ptr<GroupHandle> make_view(uint64_t view, const std::vector<int>& members);
  bool decide(uint64_t view, Decision decision);
  ViewChange describe(uint64_t view, const Decision& decision) const;
  void move_to(NextWorld world);
  MemberState freeze(const std::shared_ptr<GroupHandle>& group, uint64_t unit, bool calling);
  void install(ViewChange change);
  std::vector<int> places_of(const GroupHandle& view) const;  // with the lock held
  void look(const std::vector<int>& waiting_for, Deadline deadline, Clock::time_point& next_notice) const;
  Error changed_error() const;
  void throw_if_untold();
  void write_log_line(bool made);  // of the last change, once, after its unit is done or stopped

  // Of the present world; under change_mutex_.
  std::shared_ptr<Runtime> runtime_;  // shared with the views
  std::string name_;
  AlgorithmTables tables_;
  std::unique_ptr<Agreement> agreement_;
  std::optional<NextWorld> next_world_;
  std::shared_ptr<GroupHandle> last_view_;  // of the world before, until all members have left a unit in this one

  std::mutex change_mutex_;   // one change at a time; locked before mutex_
  mutable std::mutex mutex_;  // guards the members below
  std::shared_ptr<GroupHandle> group_;
  std::vector<int> places_;  // by rank in the runtime
  OnChange on_change_;
  std::function<void(const std::shared_ptr<GroupHandle>&)> installed_;  // under change_mutex_
  int64_t timeout_ms_;
  UnitProgress progress_;
  bool unreported_ = false;  // last_ was not reported by an exception yet
  uint64_t called_ = 0;
  std::vector<std::shared_ptr<Work>> calls_;  // operations outside units that may be unfinished
  ViewChange last_;
  bool unlogged_ = false;  // last_ was not logged yet
  std::atomic<bool> has_last_world_{false};
  UnitDescription unit_;
  std::vector<double> weights_;    // see set_weights; empty: unknown
  std::atomic<uint64_t> left_{0};  // as in progress_
  std::atomic<uint64_t> base_{0};  // left_ when the view began
  std::atomic<uint64_t> view_{1};
  std::atomic<int> rank_{0};
  std::atomic<int> size_{0};
};

// Whether the failure is the loss of a member.
inline bool is_loss(const Error& error) { return error.kind() == ErrorKind::kPeerLost; }
bool is_loss(const std::exception_ptr& failure);  // null: false

}  // namespace ringdp
