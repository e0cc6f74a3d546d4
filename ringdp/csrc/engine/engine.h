// Engine: all operations in flight of one Runtime, over its links. Its interface: groups, `submit`, `wait`,
// `shut_down`. Its parts do the work: DriverRole (which thread drives), GroupTable (operations in flight), PeerLinks
// (the network), FailureAgreement, StallMonitor, StagedCopies and Progress (the driver's loop). At any moment at most
// one thread drives: the caller of a synchronous operation or of `wait` if no other thread does, otherwise the
// communication thread. Owned by the Runtime, shared with Works and group handles. Any thread. The engine never takes
// Python's lock; an interrupt check given to `wait` may.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/log.h"
#include "collective/operation.h"
#include "engine/completion.h"
#include "engine/diagnosis.h"
#include "engine/driver_role.h"
#include "engine/engine_options.h"
#include "engine/failure_agreement.h"
#include "engine/group_table.h"
#include "engine/healing.h"
#include "engine/operation_record.h"
#include "engine/peer_links.h"
#include "engine/program_threads.h"
#include "engine/progress.h"
#include "engine/staged_copies.h"
#include "engine/stall_monitor.h"
#include "link/link.h"
#include "meet/rendezvous.h"
#include "transport/poller.h"

namespace ringdp {

// The error of a call in a forked child, which has neither the connections nor the threads.
Error forked_error();

class Engine {
 public:
  // Peers without a channel are connected later: see `healing`.
  Engine(int rank, std::vector<MeshPeer> peers, EngineOptions options);

  Healing& healing() { return healing_; }  // for the thread that makes connections

  // Returns the group's number on the wire, made from `key`, which is the same on all members, and from the number of
  // earlier groups of that key, so that frames of a destroyed group never reach a new group with the same members.
  // `name` is for messages. `outlives_losses`: operations submitted after a failure fail like those in flight, and
  // `submit` does not throw.
  uint64_t add_group(uint64_t key, const GroupView& view, const std::string& name, bool outlives_losses = false);
  // Operations still in flight fail, frames still arriving are dropped.
  // operations in flight fail; `how` is in their error
  void remove_group(uint64_t id, const std::string& how = "destroyed");

  struct Submission {
    std::unique_ptr<Operation> operation;
    int64_t timeout_ms = 0;
    bool caller_waits = false;                        // the caller calls `wait` at once: no thread is woken
    std::function<void(std::exception_ptr)> on_done;  // run on the completion thread, in operation order; may be empty
    std::shared_ptr<void> keep_alive;                 // the buffers: held by the caller too, released when it is over
    int32_t call_site = -1;                           // of the Python code that calls, see OperationRecord
  };
  // Throws the group's first failure if it has failed.
  std::shared_ptr<Work> submit(uint64_t group, Submission submission);

  // Returns when the work is done, throws its error, or Error(kTimeout) when `deadline` passes (the work goes on).
  void wait(Work& work, Deadline deadline);

  // Calls the listener when the group fails, at once if it has failed. A listener that is gone is not called.
  void listen(uint64_t group, std::weak_ptr<const FailureListener> listener);
  // Those of these places whose connection is lost. Looks at all links first.
  std::vector<int> unreachable(const std::vector<int>& places);
  void let_rest(uint64_t group);  // see OpenGroup
  // The group's first failure; null if it has none or was removed.
  std::exception_ptr failure_of(uint64_t group) const;

  // Waits until `over`, which an operation of this engine brings about: driven by this thread, as in `wait`. False: the
  // deadline has passed.
  bool wait_until(const Progress::Over& over, Deadline deadline);
  // Sends what operations submitted with `caller_waits` have to send, as far as there is room now.
  void move_on();

  // For other waiting threads: runs the options' interrupt check, which may throw.
  void check_interrupt() const {
    if (options_.check_interrupt) options_.check_interrupt();
  }

  // Fails every group and sends `why` to the peers.
  void abort(const std::string& why);

  void run_communication_thread();
  CompletionQueue& completions() { return completions_; }
  NoticeBoard& notices() { return notices_; }
  const OperationRecorder& recorder() const { return recorder_; }
  // Why this rank leaves, for the goodbye: "its program ended by ValueError: no such file".
  void set_farewell(const std::string& reason);
  void set_farewell_if_none(const std::string& reason);
  // Fails operations in flight and sends goodbyes to the peers. Returns when they have read them, or after a time
  // limit. Connections that break meanwhile should be replaced.
  void take_leave();
  // Ends the connections and the communication thread's loop; also without `shut_down`.
  void shut_down();

  Link::Traffic traffic() const { return links_.traffic(); }
  uint64_t bytes_sent_to(int peer) const { return links_.bytes_sent_to(peer); }
  std::map<int, NetworkPath::Carried> carried();  // see PeerLinks; empty after the shutdown
  const PeerInfo& peer(int rank) const { return links_.peers().info(rank); }
  int rank() const { return links_.peers().rank(); }
  int world() const { return links_.peers().world(); }

 private:
  void say_bye();  // by the driver
  LinkEvents link_events();
  void drive_until(MutexLock& lock, const Progress::Over& over, Deadline deadline) RINGDP_REQUIRES(role_.mutex());
  void break_down(const std::string& why);  // driving has thrown: fails everything

  const unsigned generation_ = fork_generation();
  const EngineOptions options_;
  CompletionQueue completions_;
  NoticeBoard notices_;
  OperationRecorder recorder_;
  Diagnosis diagnosis_;
  Poller poller_;
  Poller watcher_;
  DriverRole role_;
  GroupTable groups_;
  ProgramThreads threads_;
  PeerLinks links_;
  FailureAgreement failures_;
  Healing healing_;
  StallMonitor stalls_;
  StagedCopies copies_;
  Progress progress_;

  std::string farewell_ RINGDP_GUARDED_BY(role_.mutex());
  std::optional<Error> broken_ RINGDP_GUARDED_BY(role_.mutex());  // the error of break_down
};

}  // namespace ringdp
