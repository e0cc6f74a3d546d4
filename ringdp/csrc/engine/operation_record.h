// OperationRecorder: the last operations of one rank and when their bytes moved, for diagnosis (the flight recorder).
// It is always on. Its memory is allocated at the start; recording an operation does not allocate. Owned by the
// Engine. Written under the mutex of the role (`begin`) and by the thread that drives (everything else about an
// operation); read by any thread at any time, without a lock that the writers need. Invariant: an operation in flight
// keeps its place; one that is over keeps it until a later one takes it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "collective/operation.h"
#include "link/connection.h"
#include "link/flow.h"

namespace ringdp {

inline constexpr std::size_t kRecordedOperations = 1024;
inline constexpr std::size_t kRecordedNameBytes = 96;  // longer names of operations are cut

// FlowTimes: a FlowRecord as it was read. Value type.
struct FlowTimes {
  int peer = -1;  // rank in the Runtime's world
  bool sends = false;
  int64_t first_ns = 0;
  int64_t last_ns = 0;
  uint64_t moved = 0;
  uint64_t total = 0;
  int64_t work_first_ns = 0;
  int64_t work_last_ns = 0;
  int64_t work_ns = 0;
};

enum class OperationState : uint8_t { kQueued = 0, kStarted = 1, kDone = 2, kFailed = 3 };
const char* operation_state_name(OperationState state);

// OperationRecord: one operation as it was read. Times as in FlowRecord; 0: that has not happened. Value type.
struct OperationRecord {
  uint64_t number = 0;        // counts the operations of all groups of this rank, as they were called, from 1
  uint64_t ended_number = 0;  // counts them as they ended, from 1; 0: it is in flight
  uint64_t group = 0;         // its number on the wire; see RecordedGroup
  uint64_t sequence = 0;      // in the group, the same on all members; see in_order
  OperationShape shape;       // without layout_hash
  std::string name;           // bucket, `ringdp.named`; empty without one
  int32_t call_site = -1;     // of the Python code that called it; -1: not known
  OperationState state = OperationState::kQueued;
  int64_t queued_ns = 0;   // the call
  int64_t started_ns = 0;  // its turn came in its group
  int64_t ended_ns = 0;
  std::vector<FlowTimes> flows;  // to and from each peer
  uint32_t flows_left_out = 0;   // flows without room

  uint64_t bytes() const;  // of one rank's input
};

// RecordedGroup: the group behind OperationRecord::group. Value type.
struct RecordedGroup {
  uint64_t id = 0;
  std::string name;
  std::vector<int> members;  // ranks in the Runtime's world
  bool removed = false;
};

// RecordedFailure: why a group failed. Value type.
struct RecordedFailure {
  int64_t at_ns = 0;
  uint64_t group = 0;
  uint64_t sequence = 0;  // 0: not known
  int guilty = -1;
  std::string kind;  // the class in ringdp/errors.py
  std::string text;
};

class OperationRecorder {
 public:
  // One operation in flight, for the writer. Its address does not change.
  class Entry;

  // `peers`: how many other ranks the world has. It determines each operation's room for flows.
  explicit OperationRecorder(int peers, std::size_t capacity = kRecordedOperations);
  ~OperationRecorder();
  OperationRecorder(const OperationRecorder&) = delete;
  OperationRecorder& operator=(const OperationRecorder&) = delete;

  // Null if more operations are in flight than there are places. One thread at a time.
  Entry* begin(uint64_t group, const FlowIdentity& identity, Clock::time_point now, int32_t call_site);
  // These take null. `start`: the operation's flows write into the entry from then on.
  static void start(Entry* entry, uint64_t sequence, Operation& operation, Clock::time_point now);
  void end(Entry* entry, bool failed);

  // All records, in the order of the calls.
  std::vector<OperationRecord> all() const;
  // The operations that have ended since a cursor (0: all), in the order of their ends; `cursor` is advanced. `lost`:
  // the number of operations since then that were overwritten.
  std::vector<OperationRecord> ended_since(uint64_t& cursor, uint64_t& lost) const;
  uint64_t called() const { return called_.load(std::memory_order_relaxed); }

  // Groups and failures: rare, so under a mutex. The last 256 groups and the last 16 failures are kept.
  void add_group(uint64_t id, const std::string& name, const std::vector<int>& members);
  void remove_group(uint64_t id);
  void add_failure(RecordedFailure failure);
  std::vector<RecordedGroup> groups() const;
  std::vector<RecordedFailure> failures() const;

 private:
  bool read(const Entry& entry, OperationRecord& out) const;

  const std::size_t capacity_;
  const std::size_t flows_each_;
  const std::unique_ptr<FlowRecord[]> flows_;
  const std::unique_ptr<Entry[]> entries_;
  std::size_t next_ = 0;  // where `begin` looks first
  std::atomic<uint64_t> called_{0};
  std::atomic<uint64_t> ended_{0};

  mutable Mutex mutex_;
  std::vector<RecordedGroup> groups_ RINGDP_GUARDED_BY(mutex_);
  std::vector<RecordedFailure> failures_ RINGDP_GUARDED_BY(mutex_);
};

// The content of a dump file: the recorder's records, members, failures and stacks, as JSON
// (docs/how-to/diagnosis.md). Pure functions, any thread.
struct DumpHead {
  PeerInfo self;
  int world = 1;
  std::string reason;  // "failure: …", "signal"
  std::string stacks;  // of this process, see process_stacks
};

std::string dump_text(const OperationRecorder& recorder, const DumpHead& head);

// A text as a JSON string, in quotes.
std::string json_text(const std::string& text);

}  // namespace ringdp
