// GroupState: one group of an engine: its operations from the call to their end, and what is remembered of those that
// are over. Shared by the GroupTable and by whatever is under way in the group. What is public belongs to the thread
// that drives, but for what never changes: id, view, neighbours and name.
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
#include "collective/operation.h"
#include "engine/operation_record.h"
#include "engine/work.h"
#include "mesh/link.h"
#include "mesh/peer_state.h"

namespace ringdp {

// Told once why a group failed: by the thread that drives, which it must not block, or by the one that begins to
// listen.
using FailureListener = std::function<void(const std::exception_ptr&)>;

// MessageNumbers: how sends and receives find each other. The n-th send of a member to another under a tag and the
// n-th receive of that kind get the same sequence number, made from those four values, whatever other operations lie
// between.
class MessageNumbers {
 public:
  uint64_t peek(const PointToPoint& ends) const;  // what `next` would answer
  uint64_t next(const PointToPoint& ends);

 private:
  using Key = std::tuple<int, int, int32_t>;
  std::map<Key, uint64_t> met_;
};

// Whether an operation has a place in the order of its group's collectives.
inline bool in_order(uint64_t sequence) { return (sequence & (kCallbackBit | kMessageBit)) == 0; }

// PeerAnswer: what a peer says when it is asked what it knows of an operation.
struct PeerAnswer {
  Clock::time_point asked_at;
  bool awaited = true;             // it has not answered that yet
  std::optional<PeerState> state;  // its last answer
};

// PeerStacks: what a peer's threads do, as it answered when it was asked for that.
struct PeerStacks {
  Clock::time_point asked_at{};
  std::string text;  // empty: it has not answered
};

// InFlight: an operation between `submit` and its end.
struct InFlight {
  std::unique_ptr<Operation> operation;
  std::shared_ptr<Work> work;
  std::shared_ptr<void> keep_alive;  // with the caller
  std::optional<uint64_t> callback;  // in which it was issued
  Deadline deadline = Deadline::never();
  int64_t timeout_ms = 0;
  uint64_t progress = 0;                       // at moved_at
  Clock::time_point moved_at;                  // when it was called, then when a byte of it moved last
  Clock::time_point asked_at;                  // when the peers were asked about it last
  OperationRecorder::Entry* record = nullptr;  // null where the recorder has no room
  std::map<int, PeerAnswer> answers;           // by rank; of the time since moved_at
  std::map<int, PeerStacks> stacks;            // the same

  uint64_t sequence() const { return work->sequence(); }
};

// CallingThread: a thread of the program that has called a collective of a group, and the last one that it called.
struct CallingThread {
  pid_t thread = 0;
  uint64_t last = 0;
};

class GroupState {
 public:
  GroupState(uint64_t id, GroupView view, std::vector<int> neighbours, std::string name);

  const uint64_t id;
  const GroupView view;
  const std::vector<int> neighbours;  // places in the world; of a group that need not be connected each to each
  const std::string name;
  std::atomic<bool> outlives_losses{false};  // see Engine; any thread
  std::vector<CallingThread> callers;        // ProgramThreads', the latest: by the mutex of the role

  bool failing = false;            // a failure is pending: nothing starts or ends any more
  std::set<int> reported_by;       // ranks that reported a failure of it
  Clock::time_point noticed_at{};  // when the log last said that something waits
  std::deque<InFlight> queued;
  std::deque<InFlight> active;   // started, retired in order
  std::vector<InFlight> nested;  // messages, and what callbacks issued, in order within each
  std::deque<InFlight> unbound;  // receives that wait to know their sender, as they were posted
  MessageNumbers messages;

  bool idle() const { return queued.empty() && active.empty() && nested.empty() && unbound.empty(); }
  // Of what has begun the oldest, collectives first; null where nothing has.
  const InFlight* oldest() const;
  // Everything that has begun: calls `look` until it answers true.
  bool any_running(const std::function<bool(const InFlight&)>& look) const;
  // The earlier operation that the same callback issued on the same memory; null if there is none.
  const InFlight* in_the_way(const InFlight& later) const;

  // An operation starts. Frames may come for one from which this rank expects none: Link asks what it was.
  void remember(const FlowIdentity& identity);
  StartedOperation find_started(uint64_t sequence) const;
  std::string last_called() const;  // in the group's order; empty if nothing

 private:
  friend class GroupTable;

  std::vector<FlowIdentity> history_;        // what was started last, at sequence modulo its size
  std::deque<FlowIdentity> nested_history_;  // the same for those issued inside callbacks
  uint64_t started_upto_ = 0;

  // Guarded by the table's mutex.
  uint64_t next_sequence_ = 0;
  std::exception_ptr failure_;
  std::vector<std::weak_ptr<const FailureListener>> listeners_;
};

using GroupPtr = std::shared_ptr<GroupState>;  // shared by the table and what is under way

}  // namespace ringdp
