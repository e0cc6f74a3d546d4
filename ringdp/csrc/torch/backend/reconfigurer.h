// The members of a process group (Membership), and what replaces them (Reconfigurer).
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "engine/group.h"

namespace ringdp {

// Membership: a process group's Runtime, group and listener. Replaced as a whole when the group is reconfigured. Value
// type.
struct Membership {
  std::shared_ptr<Runtime> runtime;  // all three null in a group that waits for its first reconfigure
  std::shared_ptr<GroupHandle> group;
  std::shared_ptr<const FailureListener> listener;  // runs the abort hooks when the group fails

  // Operations in flight fail; the abort hooks do not run.
  void close(const std::string& how = "destroyed") {
    listener.reset();
    if (group) group->close(how);
  }
};

}  // namespace ringdp

#ifdef C10D_BACKEND_HAS_RECONFIGURE

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "meet/reconfiguration.h"

namespace ringdp {

// Reconfigurer: the attempts of a process group to get new members (torch's reconfigure, since 2.14). One attempt runs
// at a time, on a thread of its own: it runs a rendezvous with the new members, makes a Runtime and a group of them,
// and passes both to its owner; an attempt that fails changes nothing. Owned by a ProcessGroupRing; any thread,
// without the GIL.
class Reconfigurer {
 public:
  struct Settings {
    RendezvousOptions rendezvous;
    EngineOptions engine;
    AlgorithmTables tables;
    std::string name;        // of the group
    int64_t timeout_ms = 0;  // default of an attempt
  };
  // Installs the new members, on the attempt's thread, and returns the old ones, which are closed afterwards.
  using Install = std::function<Membership(Membership)>;

  Reconfigurer(Settings settings, Install install);
  ~Reconfigurer();
  Reconfigurer(const Reconfigurer&) = delete;
  Reconfigurer& operator=(const Reconfigurer&) = delete;

  std::string handle();
  // Throws Error(kState) while an attempt is under way. `group_timeout_ms`: of the new group's operations.
  c10::intrusive_ptr<c10d::Work> begin(const c10d::ReconfigureOptions& options, int64_t group_timeout_ms);
  bool under_way() const { return under_way_; }
  void stop();  // ends an attempt that is under way, and waits for it; idempotent

 private:
  Membership attempt(const Reconfiguration::Members& members, int64_t timeout_ms, int64_t group_timeout_ms);

  const Settings settings_;
  const Install install_;
  const unsigned generation_ = fork_generation();
  std::mutex mutex_;                 // guards the members below
  Reconfiguration reconfiguration_;  // during an attempt, used by its thread only
  std::string handle_;
  std::unique_ptr<std::thread> thread_;
  std::atomic<bool> under_way_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace ringdp

#endif
