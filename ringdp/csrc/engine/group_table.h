// The groups of an engine (GroupTable), and what each of them has in flight (GroupState, Work).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/deadline.h"
#include "base/thread_safety.h"
#include "collective/operation.h"
#include "engine/driver_role.h"
#include "engine/operation_record.h"
#include "link/frame.h"
#include "link/link.h"

namespace ringdp {

// Work: the handle of an operation in flight. Made by Engine::submit; shared by the caller that issued the operation
// and by the engine until it is done. Any thread.
class Work {
 public:
  Work(uint64_t group, uint64_t sequence, int lane, std::string text, std::function<void(std::exception_ptr)> on_done)
      : group_(group), sequence_(sequence), lane_(lane), text_(std::move(text)), on_done_(std::move(on_done)) {}

  bool finished() const { return state_.load(std::memory_order_acquire) != kRunning; }
  bool failed() const { return state_.load(std::memory_order_acquire) == kFailed; }
  // Null unless failed. Only after `finished`.
  std::exception_ptr error() const { return failed() ? error_ : nullptr; }

  uint64_t group() const { return group_; }
  // Of a message: provisional until its other end is known.
  uint64_t sequence() const { return sequence_.load(std::memory_order_acquire); }
  int source() const {
    return source_.load(std::memory_order_acquire);
  }  // of a received message: its sender, once known
  int lane() const { return lane_; }  // of the CompletionQueue on which `on_done` runs
  const std::string& text() const { return text_; }

 private:
  friend class Engine;
  friend class MessageMatching;
  friend class Progress;
  static constexpr int kRunning = 0, kDone = 1, kFailed = 2;

  void finish(std::exception_ptr error, std::shared_ptr<void> buffers) {
    error_ = std::move(error);
    buffers_ = std::move(buffers);
    state_.store(error_ ? kFailed : kDone, std::memory_order_release);
  }

  const uint64_t group_;
  std::atomic<uint64_t> sequence_;
  std::atomic<int> source_{-1};
  const int lane_;
  const std::string text_;
  std::function<void(std::exception_ptr)> on_done_;  // run once on the completion thread, in operation order
  std::exception_ptr error_;
  std::shared_ptr<void>
      buffers_;  // once finished, without `on_done`: the waiting thread drops them, holding the engine's lock
  std::atomic<int> state_{kRunning};
};

// Called once with the failure of a group: by the thread that drives, which it must not block, or by `listen`.
using FailureListener = std::function<void(const std::exception_ptr&)>;

// MessageNumbers: matches sends and receives. The n-th send of a member to another with a tag and the n-th receive of
// that kind get the same sequence number, made from those four values, independent of other operations.
class MessageNumbers {
 public:
  uint64_t peek(const PointToPoint& ends) const;  // what `next` would return
  uint64_t next(const PointToPoint& ends);

 private:
  using Key = std::tuple<int, int, int32_t>;
  std::map<Key, uint64_t> met_;
};

// Whether an operation has a place in the order of its group's collectives.
inline bool in_order(uint64_t sequence) { return (sequence & (kCallbackBit | kMessageBit)) == 0; }

// PeerAnswer: a peer's answers to pings about an operation.
struct PeerAnswer {
  Clock::time_point asked_at;
  bool awaited = true;             // the last ping has no answer yet
  std::optional<PeerState> state;  // its last answer
};

// PeerStacks: the stacks of a peer's threads, as it sent them.
struct PeerStacks {
  Clock::time_point asked_at{};
  std::string text;  // empty: no answer yet
};

// InFlight: an operation between `submit` and its end.
struct InFlight {
  std::unique_ptr<Operation> operation;
  std::shared_ptr<Work> work;
  std::shared_ptr<void> keep_alive;  // with the caller
  std::optional<uint64_t> callback;  // that issued it
  Deadline deadline = Deadline::never();
  int64_t timeout_ms = 0;
  bool rests = false;                          // a receive of a group that rests
  uint64_t progress = 0;                       // at moved_at
  Clock::time_point moved_at;                  // the time of the call, then of the last byte
  Clock::time_point asked_at;                  // of the last pings about it
  OperationRecorder::Entry* record = nullptr;  // null where the recorder has no room
  std::map<int, PeerAnswer> answers;           // by rank; since moved_at
  std::map<int, PeerStacks> stacks;            // the same

  uint64_t sequence() const { return work->sequence(); }
};

// CallingThread: a thread of the program that has called a collective of a group, and the last one that it called.
struct CallingThread {
  pid_t thread = 0;
  uint64_t last = 0;
};

// GroupState: one group of an engine: its operations from the call to their end, and a history of ended ones. Shared
// by the GroupTable and by operations in flight. The public members are for the thread that drives, except the
// constant ones: id, view, neighbours and name.
class GroupState {
 public:
  GroupState(uint64_t id, GroupView view, std::vector<int> neighbours, std::string name);

  const uint64_t id;
  const GroupView view;
  const std::vector<int> neighbours;  // places in the world; of a group that need not be connected each to each
  const std::string name;
  std::atomic<bool> outlives_losses{false};  // see Engine; any thread
  std::atomic<bool> rests{false};            // see OpenGroup::let_rest; any thread
  // used by ProgramThreads, the latest ones; guarded by the mutex of the role
  std::vector<CallingThread> callers;

  bool failing = false;            // a failure is pending: no operation starts or ends any more
  std::set<int> reported_by;       // ranks that reported a failure of it
  Clock::time_point noticed_at{};  // of the last log line about a wait
  std::deque<InFlight> queued;
  std::deque<InFlight> active;   // started, retired in order
  std::vector<InFlight> nested;  // messages, and what callbacks issued, in order within each
  std::deque<InFlight> unbound;  // receives whose sender is not known yet, in the order of the calls
  MessageNumbers messages;

  bool idle() const { return queued.empty() && active.empty() && nested.empty() && unbound.empty(); }
  // The oldest started operation, collectives first; null if there is none.
  const InFlight* oldest() const;
  // Calls `look` for the started operations until it returns true.
  bool any_running(const std::function<bool(const InFlight&)>& look) const;
  // The earlier operation that the same callback issued on the same memory; null if there is none.
  const InFlight* in_the_way(const InFlight& later) const;

  // Records a started operation. Frames may come for one from which this rank expects none: Link then reads the
  // history.
  void remember(const FlowIdentity& identity);
  StartedOperation find_started(uint64_t sequence) const;
  std::string last_called() const;  // in the group's order; empty if nothing

 private:
  friend class GroupTable;

  std::vector<FlowIdentity> history_;        // the last started operations, at sequence modulo its size
  std::deque<FlowIdentity> nested_history_;  // the same for those issued inside callbacks
  uint64_t started_upto_ = 0;

  // Guarded by the table's mutex.
  uint64_t next_sequence_ = 0;
  std::exception_ptr failure_;
  std::vector<std::weak_ptr<const FailureListener>> listeners_;
};

using GroupPtr = std::shared_ptr<GroupState>;  // shared by the table and what is under way

// GroupTable: the groups of an engine, by their number on the wire, with their order of calls, failures and listeners,
// and which of them have operations. Owned by the Engine. Any thread, except `busy`. Its mutex is locked last, and no
// callback runs while it is held.
class GroupTable {
 public:
  explicit GroupTable(const DriverRole& role) : role_(role) {}

  // The number is made from `key`, which is the same on all members, and from the number of earlier groups of that
  // key, so that frames of a destroyed group never reach a new group with the same members.
  GroupPtr add(uint64_t key, const GroupView& view, std::vector<int> neighbours, const std::string& name);
  void remove(uint64_t id);

  GroupPtr find(uint64_t id) const;  // null if there is none
  std::vector<GroupPtr> all() const;
  std::vector<GroupPtr> with(int peer) const;  // groups with that rank as a member

  // The number of the next operation in the group's order.
  uint64_t next_sequence(GroupState& group);
  uint64_t called_upto(const GroupState& group) const;  // of the last one; 0: none

  // A group fails once: false if it has failed already. Calls the listeners.
  bool fail(GroupState& group, const std::exception_ptr& failure);
  std::exception_ptr failure_of(const GroupState& group) const;
  // Calls the listener when the group fails, at once if it has failed. A listener that is gone is not called.
  void listen(uint64_t id, const std::weak_ptr<const FailureListener>& listener);
  // A group that does not exist here yet has failed: it gets that failure when it is made. Returns the group if it was
  // made meanwhile.
  GroupPtr fail_early(uint64_t id, const std::exception_ptr& failure);

  // The groups with operations queued or started. For the driver.
  std::vector<GroupPtr>& busy() {
    role_.assert_held();
    return busy_;
  }
  const std::vector<GroupPtr>& busy() const {
    role_.assert_held();
    return busy_;
  }
  void make_busy(const GroupPtr& group);

 private:
  const DriverRole& role_;
  std::vector<GroupPtr> busy_ RINGDP_GUARDED_BY(role_);

  mutable Mutex mutex_;
  std::map<uint64_t, GroupPtr> groups_ RINGDP_GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> made_ RINGDP_GUARDED_BY(mutex_);                      // groups so far, by key
  std::map<uint64_t, std::exception_ptr> early_failures_ RINGDP_GUARDED_BY(mutex_);  // by number
};

}  // namespace ringdp
