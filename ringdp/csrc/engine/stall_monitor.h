// StallMonitor: finds the ranks for which an operation waits. For an operation that does not move it pings the other
// ranks, answers their pings, finds the ranks at the end of the chain of waiting, and logs them. Engines answer even
// if their program is stuck, so an answer shows that the process lives. Owned by the Engine. Used by the thread that
// drives: called by Progress and by the links' events; `note_call` by any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "engine/diagnosis.h"
#include "engine/driver_role.h"
#include "engine/group_table.h"
#include "engine/peer_links.h"
#include "engine/program_threads.h"
#include "link/frame.h"

namespace ringdp {

class StallMonitor {
 public:
  // `notice_ms`: how often the log names the ranks for which an operation waits; 0: never.
  StallMonitor(DriverRole& role, const GroupTable& groups, const ProgramThreads& threads, PeerLinks& links,
               NoticeBoard& notices, Diagnosis& diagnosis, int64_t notice_ms);

  void note_call(Clock::time_point now) { called_at_.store(now.time_since_epoch().count(), std::memory_order_relaxed); }

  // At intervals: pings about operations that do not move, and logs the answers.
  void look(Clock::time_point now);
  // Deadlocks that `look` has found: groups and their errors.
  std::vector<std::pair<uint64_t, Error>> take_deadlocks();
  // "rank 1 calls the collectives of group 'x' from several threads, …": empty if it does not.
  std::string several_callers(uint64_t group) const;

  // `with_stacks`: it also asks for the stacks of this process, which takes a while.
  void on_asked(int peer, uint64_t group, uint64_t sequence, bool with_stacks);
  void on_answered(int peer, uint64_t group, uint64_t sequence, const PeerState& state);
  void on_stacks(int peer, uint64_t group, uint64_t sequence, const std::string& stacks);
  void answer();  // sends the answers to pings that came while a link was being pumped

  Error explain_timeout(const InFlight& in_flight) const;

 private:
  struct Ping {
    int peer;
    uint64_t group;
    uint64_t sequence;
  };

  void answer_with_stacks(const Ping& ping);
  void send_stacks();
  void watch(GroupState& group, InFlight& in_flight, Clock::time_point now);
  void ask_members(const GroupState& group, InFlight& in_flight, Clock::time_point now);
  PeerState state_of(int asker, uint64_t group, uint64_t sequence) const;
  void note_blocked(int asker, const GroupState& group, PeerState& state) const;
  // A deadlock for `take_deadlocks`: this rank waits in the operation for a rank that waits in another group for this
  // one, and neither can call the other's operation.
  bool find_deadlock(const GroupState& group, const InFlight& in_flight);
  std::vector<MissingRank> find_missing(const InFlight& in_flight) const;
  void add_reported_by_others(const InFlight& in_flight, std::vector<MissingRank>& found) const;
  // Asks the missing ranks for their stacks, once for each notice; true while answers may still come.
  bool await_stacks(const GroupState& group, InFlight& in_flight, const std::vector<MissingRank>& missing,
                    Clock::time_point now);
  void log_stacks(const InFlight& in_flight, const std::string& notice);
  // For which ranks it waits, and all that is known about why: for the log and for errors. `between` two ranks.
  std::string explain_wait(const InFlight& in_flight, const std::vector<MissingRank>& missing,
                           const char* between) const;

  DriverRole& role_;
  const GroupTable& groups_;
  const ProgramThreads& threads_;
  PeerLinks& links_;
  const PeerTable& peers_;
  NoticeBoard& notices_;
  Diagnosis& diagnosis_;
  const int64_t notice_ms_;
  std::atomic<Clock::rep> called_at_{0};  // the last submit; 0: none
  std::vector<Ping> pings_ RINGDP_GUARDED_BY(role_);
  std::vector<std::pair<uint64_t, Error>> deadlocks_ RINGDP_GUARDED_BY(role_);
  std::atomic<bool> stacks_there_{false};
  std::vector<std::pair<Ping, std::string>> stacks_ RINGDP_GUARDED_BY(role_.mutex());  // answers to be sent
  Clock::time_point next_look_ RINGDP_GUARDED_BY(role_){};
};

}  // namespace ringdp
