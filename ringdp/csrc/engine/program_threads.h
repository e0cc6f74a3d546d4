// ProgramThreads: which threads of the program call the collectives of each group, and which of them wait for one now. From that
// the StallMonitor tells whether a call that is missing can still come: it cannot where every thread that calls that group's
// collectives waits, without a limit, for an operation of another group.
// Invariant: each thread inside `Engine::wait` without a deadline has one entry of `waits_`; `callers_` has each thread that has
// ever called a collective.
// Owned by the Engine. Any thread, with the mutex of the role.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/driver_role.h"
#include "engine/group_state.h"
#include "engine/work.h"

namespace ringdp {

class ProgramThreads {
 public:
  explicit ProgramThreads(DriverRole& role) : role_(role) {}

  // This thread calls a collective. Threads of ringdp, and autograd's for a GPU, call for the program: they count, too.
  void note_call(GroupState& group, uint64_t sequence);

  // This thread waits for `work` for as long as it takes, while this lives.
  class Waiting {
   public:
    Waiting(ProgramThreads& threads, MutexLock& lock, const Work& work);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    ProgramThreads& threads_;
    MutexLock& lock_;  // of the mutex of the role, which an exception may have let go
  };

  // The group in which all threads wait for a collective that may call one of `group`; 0: not all of them wait, they wait in
  // several groups or in `group` itself, or it is not known which threads may call. `others_busy`: operations of a third group
  // are under way, whose end may be what a first call waits for.
  uint64_t blocked_in(const GroupState& group, bool others_busy) const;

  // "the main thread (last #4) and thread 4711 (last #5)": which threads call the group's collectives; empty where it is one
  // alone, or autograd's beside it.
  std::string several(const GroupState& group) const;

 private:
  struct Wait {
    pid_t thread;
    uint64_t group;
    bool in_order;  // for a collective, not for a message or inside a callback
  };

  DriverRole& role_;
  std::vector<Wait> waits_ RINGDP_GUARDED_BY(role_.mutex());
  std::vector<pid_t> callers_ RINGDP_GUARDED_BY(role_.mutex());
};

}  // namespace ringdp
