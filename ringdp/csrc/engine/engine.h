// Engine: all operations in flight of one Runtime, over its Links. At any moment at most one thread drives it: the caller
// of a synchronous operation or of `wait` if no other thread does, otherwise the communication thread.
// Owned by the Runtime, shared with Works and group handles. Called by GroupHandle, and by Link through its events.
//
// Who may touch what: the members under "shared" are guarded by the mutex of the DriverRole; those under "driver" belong to
// the thread that holds the role. submit, wait and the group functions are for any thread. The engine never takes Python's
// lock; an interrupt check given to `wait` may.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "collective/operation.h"
#include "engine/completion.h"
#include "engine/driver_role.h"
#include "engine/group_table.h"
#include "engine/notices.h"
#include "engine/pending_copies.h"
#include "engine/work.h"
#include "mesh/link.h"
#include "mesh/rendezvous.h"
#include "transport/poller.h"
#include "transport/rate_limit.h"

namespace ringdp {

struct EngineOptions {
  int64_t spin_us = 50;                                // how long a waiting caller polls before it sleeps
  bool shares_cores = false;                           // more ranks than cores here: a thread that polls yields
  int64_t stall_notice_ms = 10'000;                    // how often a log line says who an operation waits for; 0: never
  int64_t host_silence_ms = 4000;                      // after which a peer whose host does not answer is lost
  int64_t rate_bytes_per_s = 0;                        // what is sent over streams (TCP) at most; 0: all that goes
  std::function<void(int peer)> want_connection = {};  // to a peer without one; by any thread, must not block
  std::function<void()> check_interrupt;      // called about ten times a second by threads that wait; may throw
  std::size_t segment_bytes = kSegmentBytes;  // longest payload of a frame sent; for tests
  std::function<std::unique_ptr<Channel>(std::unique_ptr<Channel>, int peer)> wrap_channel;  // the same
};

// What a call in a forked child gets: it has neither the connections nor the threads.
Error forked_error();

class Engine {
 public:
  // Peers without a channel are connected later: see `connect`.
  Engine(int rank, std::vector<MetPeer> peers, EngineOptions options);

  // The connection that was wanted, or that the peer wanted; or why there is none. `gone`: the peer has ended. Any thread.
  void connect(int peer, std::unique_ptr<Channel> channel, bool checksums);
  void cannot_connect(int peer, const Error& error, bool gone);

  // Returns the group's number on the wire: from `key`, which is the same on all members, and from how many groups of that
  // key came before, so that frames of a destroyed group never reach one that is made like it. `name` is for messages.
  uint64_t add_group(uint64_t key, const GroupView& view, const std::string& name);
  // Operations still in flight fail, frames still arriving are dropped.
  void remove_group(uint64_t id, const std::string& how = "destroyed");  // operations in flight fail with that word

  struct Submission {
    std::unique_ptr<Operation> operation;
    int64_t timeout_ms = 0;
    bool caller_waits = false;                        // a `wait` follows at once: wake no thread
    std::function<void(std::exception_ptr)> on_done;  // run on the completion thread, in operation order; may be empty
    std::shared_ptr<void> keep_alive;                 // the buffers: held by the caller too, released when it is over
  };
  // Throws the group's first failure if it has failed.
  std::shared_ptr<Work> submit(uint64_t group, Submission submission);

  // Returns when the work is done, throws its error, or Error(kTimeout) when `deadline` passes (the work goes on).
  void wait(Work& work, Deadline deadline);

  // Calls the listener when the group fails, at once if it has failed. A listener that is gone is not called.
  void listen(uint64_t group, std::weak_ptr<const FailureListener> listener);
  // The group's first failure; null where it has none or was removed.
  std::exception_ptr failure_of(uint64_t group) const;

  // For other threads that wait: runs the options' check, which may throw.
  void check_interrupt() const {
    if (options_.check_interrupt) options_.check_interrupt();
  }

  // Fails every group and tells the peers `why`.
  void abort(const std::string& why);

  void run_communication_thread();
  CompletionQueue& completions() { return completions_; }
  NoticeBoard& notices() { return notices_; }
  // Why this rank leaves, for the goodbye: "its program ended by ValueError: no such file".
  void set_farewell(const std::string& reason);
  // Fails what is in flight, says goodbye to the peers, ends the communication thread's loop.
  void shut_down();

  uint64_t bytes_sent() const;
  uint64_t bytes_sent_to(int peer) const;
  uint64_t bytes_received() const;
  const PeerInfo& peer(int rank) const { return peers_[rank]; }
  int rank() const { return rank_; }
  int world() const { return static_cast<int>(peers_.size()); }

 private:
  struct Question {
    int peer;
    uint64_t group;
    uint64_t sequence;
  };

  // Roles and threads (engine.cpp).
  void check_usable() const;                                                   // not shut down; mutex held
  std::unique_ptr<Channel> adopt(std::unique_ptr<Channel> channel, int peer);  // polled from now on
  void finish(InFlight& in_flight, std::exception_ptr error);

  // The driver's work (progress.cpp).
  void drive(const Work* until, Deadline deadline, int64_t spin_us);
  bool poll_on(Clock::time_point end);
  void take_inbox();
  bool advance_groups();  // starts and retires; true if anything changed
  bool start_next(GroupState& group);
  void start(GroupState& group, InFlight& in_flight);
  bool retire(GroupState& group);
  void conclude(InFlight& in_flight);
  void take_message(GroupState& group, InFlight in_flight);  // these four: matching.cpp
  void start_message(GroupState& group, InFlight in_flight);
  bool bind_receives(GroupState& group);
  int find_sender(const GroupState& group, PointToPoint ends);
  bool pump_links();
  bool serve(const std::vector<Poller::Event>& events);
  bool lie_down();
  void sleep(const Work* until, Deadline deadline);
  void watch_blocked();  // tells the poller which channels are full
  bool anything_outgoing() const;
  void check_deadlines();
  Deadline next_deadline() const;
  bool look_at_copies();  // these three: copies.cpp
  bool look_at_copies(GroupState& group, InFlight& in_flight);
  void set_timer();

  // Operations that do not move (stall_monitor.cpp), by the driver.
  void look_while_idle();
  void look_around();
  void watch_stall(GroupState& group, InFlight& in_flight, Clock::time_point now);
  void ask_members(const GroupState& group, InFlight& in_flight, Clock::time_point now);
  void on_answered(int peer, uint64_t group, uint64_t sequence, PeerState state);
  void answer_questions();
  PeerState state_of(uint64_t group, uint64_t sequence) const;
  std::vector<MissingRank> find_missing(const InFlight& in_flight) const;
  void add_reported_by_others(const InFlight& in_flight, std::vector<MissingRank>& found) const;
  std::string format_missing(const std::vector<MissingRank>& missing) const;

  // Failures (failures.cpp), by the driver.
  bool guarded(int peer, const std::function<bool(Link&)>& action);  // what it throws ends the link
  void stop_polling(Link& link);
  void lose_link(int peer, const Error& error);
  void on_departed(int peer, const std::string& reason);
  void on_mismatched(Link::Disagreement disagreement);
  void on_aborted(int peer, uint64_t group, const AbortNotice& notice);
  void report_failures();
  void queue_failure(uint64_t group, Error error);  // when the link at hand has been pumped
  void defer_failure(const GroupPtr& group, Failure failure);
  void end_pending_failures();
  void notify_members(const GroupState& group, const AbortNotice& notice);
  // Whether this rank tells that member of a failure of the group: over usable connections, and to the neighbours in a
  // group whose members are not all connected.
  bool notifies(const GroupState& group, int member) const;
  void fail_group(GroupState& group, const Error& error, const AbortNotice& notice);
  void fail_quietly(GroupState& group, const Error& error, const AbortNotice& notice);
  static AbortNotice notice_of(const Error& error);
  Error explain_loss(const GroupState& group, int peer, const Error& cause) const;
  Error explain_damage(const GroupState& group, int peer, const Error& cause) const;
  Error explain_departure(const GroupState& group, int peer) const;
  Error explain_timeout(const InFlight& in_flight) const;

  const int rank_;
  const unsigned generation_ = fork_generation();
  const EngineOptions options_;
  std::vector<PeerInfo> peers_;
  CompletionQueue completions_;
  NoticeBoard notices_;
  Poller poller_;
  DriverRole role_;
  GroupTable groups_;

  // shared
  std::string farewell_;
  Clock::time_point called_at_{};  // the last submit
  std::vector<std::pair<GroupPtr, InFlight>> inbox_;

  // driver
  std::optional<RateLimiter> limiter_;  // of all streams; outlives the links
  std::vector<std::unique_ptr<Link>> links_;
  std::size_t first_link_ = 0;  // with a limiter: whose turn it is
  bool some_streams_ = false;   // not all links are direct
  std::vector<char> writing_;   // the poller watches for room to write
  ScratchPool scratch_;
  Clock::time_point crowded_until_{};    // another process wants this core: no polling before that
  int yields_used_ = 0;                  // in a row, by another process
  unsigned turns_ = 0;                   // rounds of the driver, whichever thread it was
  Clock::time_point interrupt_check_{};  // the last one of a sleeping driver
  std::size_t staged_ = 0;               // operations whose memory mirrors a device's
  bool copying_ = false;                 // one of them waits for input
  Clock::time_point copies_moved_at_{};
  PendingCopies pending_copies_;
  std::vector<Failure> failures_;    // found while a link was being pumped
  std::vector<Question> questions_;  // the same
  std::vector<GroupPtr> failing_groups_;
  std::vector<std::string> farewells_;        // of peers that left
  std::vector<std::optional<Error>> losses_;  // why the link to a peer broke
  Clock::time_point next_look_{};
  Clock::time_point next_host_check_{};
};

}  // namespace ringdp
