// ProgramThreads: which threads of the program call the collectives of each group, and which of them wait for one now.
// From that the StallMonitor decides whether a missing call can still come: it cannot if all threads of the program
// wait, without a limit, for collectives of one other group. Invariant: each thread inside `Engine::wait` without a
// deadline has an entry of `waits_` for each of its waits. Owned by the Engine. Any thread, with the mutex of the
// role.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/driver_role.h"
#include "engine/group_table.h"

namespace ringdp {

class ProgramThreads {
 public:
  explicit ProgramThreads(DriverRole& role) : role_(role) {}

  // This thread calls a collective.
  void note_call(GroupState& group, uint64_t sequence);

  // While it exists, this thread waits for `work` without a limit.
  class Waiting {
   public:
    Waiting(ProgramThreads& threads, MutexLock& lock, const Work& work);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    ProgramThreads& threads_;
    MutexLock& lock_;  // of the mutex of the role, which an exception may have unlocked
  };

  // The group for whose collectives all threads of the program wait; 0: one of them runs, or waits for another group
  // or for a message, or they were not counted since the last of them began to wait. Operations of callbacks are
  // matched separately, so they are never the missing call.
  uint64_t blocked_in() const;

  // "the main thread (last #4) and thread 4711 (last #5)": the threads that call the group's collectives; empty if it
  // is a single one, besides autograd's.
  std::string several(const GroupState& group) const;

 private:
  struct Wait {
    pid_t thread;
    uint64_t group;
    bool in_order;  // for a collective, not for a message or inside a callback
    Clock::time_point began;
  };

  DriverRole& role_;
  std::vector<Wait> waits_ RINGDP_GUARDED_BY(role_.mutex());
};

}  // namespace ringdp
